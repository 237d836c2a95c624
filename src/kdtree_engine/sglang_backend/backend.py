"""The attention backend: SGLang's Triton backend, whose kernel of target-verify steps is replaced or accompanied.

The parent writes the cache, builds the metadata and calls `self.extend_attention_fwd` with tensors; that attribute is
where ours stands. In a step that ours cannot serve, for a reason that is said once, the parent's kernel gets the call
unchanged.

In a CUDA graph both kernels are captured, and which of them does anything is decided by tensors that the host fills
between steps: a kernel whose requests are all empty reads no key. So the mode may change without capturing again.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from kdtree_engine._native import library
from kdtree_engine.errors import KernelError
from kdtree_engine.ops.verify_attn_paged import verify_attn_paged
from kdtree_engine.sglang_backend import parity

if TYPE_CHECKING:
    from collections.abc import Callable

_GEOMETRIES = {(512, 64), (512, 0), (256, 64), (256, 32)}
# What the incumbent's call may hold beside what ours knows, with the values that mean nothing.
_IDLE = {
    "is_causal": True,
    "skip_prefix_custom_mask": True,
    "sliding_window_size": -1,
    "sinks": None,
    "window_kv_offsets": None,
    "xai_temperature_len": -1,
    "lse_extend": None,
    "skip_prefix": False,
    "skip_extend": False,
    "score_mod": None,
    "aux_tensors": None,
    "k_scale": 1.0,
    "v_scale": 1.0,
}


class KDTreeMLAVerifyBackend(TritonAttnBackend):  # type: ignore[misc]
    """Verify attention of MLA layers by `verify_attn_flash_paged`; everything else is the parent's.

    Attributes:
        parity: mode, counters and comparisons, shared by all backends of the process.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self.parity = parity.shared()
        self._incumbent = self.extend_attention_fwd  # type: ignore[has-type]
        self._signature = inspect.signature(inspect.unwrap(self._incumbent))
        self.extend_attention_fwd = self._verify_or_not
        self._num_layers = int(model_runner.model_config.num_hidden_layers)
        self._refused = self._why_never(model_runner)
        if self._refused:
            self.parity.fall_back(self._refused)
        self._call: tuple[Any, Any] | None = None
        self._compares = False  # in the present step
        self._indptr: tuple[Any, ...] = ()  # of a capture: the metadata's, and for each of the two what it is to see
        device = torch.device(self.device)
        # ours runs, the incumbent runs, ours is used
        self._switches = torch.zeros(3, dtype=torch.int32, device=device)
        self._set = (-1, -1, -1)
        # per layer: comparisons, and the worst relL2, row relL2 and difference of them
        self._found = torch.zeros(self._num_layers, 4, device=device)
        self._read: Any = None
        self._ready: Any = None

    def _why_never(self, runner: Any) -> str:
        """Why ours can serve nothing of this model; empty when it can."""
        config = runner.model_config
        sparse = getattr(getattr(config, "hf_config", None), "index_topk", None)
        if not self.use_mla:
            return "the model's attention is not MLA"
        if sparse is not None and config.context_len > sparse:
            return (
                f"the model attends to {sparse} selected keys of up to {config.context_len}; dense attention is wrong"
            )
        if getattr(self, "dcp_size", 1) > 1:
            return "decode context parallelism splits the keys"
        if self.enable_deterministic:
            return "deterministic mode has a kernel of its own"
        if self.num_draft_tokens is not None and self.num_draft_tokens > 256:
            return f"trees of {self.num_draft_tokens} nodes, at most 256 are possible"
        try:
            self._library = library("cuda" if torch.device(self.device).type == "cuda" else "host")
        except KernelError as error:
            return str(error)
        return ""

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._call = (layer, forward_batch)
        try:
            return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)
        finally:
            self._call = None

    def _verify_or_not(self, *args: Any, **kwargs: Any) -> None:
        """Stands in for the parent's kernel."""
        if self._call is None or not self._call[1].forward_mode.is_target_verify():
            self._incumbent(*args, **kwargs)
            return
        layer, _ = self._call
        self.parity.counters["verify calls"] += 1
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        reason = self._refused or self._why_not(given)
        if reason:
            self.parity.fall_back(reason)
            self._incumbent(*args, **kwargs)
        elif given["q_extend"].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured(layer.layer_id, given)
        else:
            self._eager(layer.layer_id, given)

    @staticmethod
    def _why_not(given: dict[str, Any]) -> str:
        """Why ours cannot serve this call; empty when it can."""
        q, k, v = given["q_extend"], given["k_extend"], given["v_extend"]
        pool = given["k_buffer"]
        for name, idle in _IDLE.items():
            value = given.get(name, idle)
            if value is not idle and value != idle:
                return f"{name} is {value if isinstance(value, int | float) else 'given'}"
        if q.dtype != torch.bfloat16:
            return f"queries are {str(q.dtype).removeprefix('torch.')}, bfloat16 is possible"
        if pool.dtype != torch.bfloat16:
            return f"the cache is {str(pool.dtype).removeprefix('torch.')}, bfloat16 is possible"
        if pool.shape[-2] != 1 or k.shape[-2] != 1:
            return f"{k.shape[-2]} heads of keys, one is possible"
        width, d_latent = q.shape[-1], v.shape[-1]
        if (d_latent, width - d_latent) not in _GEOMETRIES or pool.shape[-1] != width:
            return f"rows of {width} with values of {d_latent} are none of the kernel's geometries"
        if q.shape[-2] > 128:
            return f"{q.shape[-2]} heads, at most 128 are possible"
        if not 1 <= int(given["max_len_extend"]) <= 256:
            return f"trees of {given['max_len_extend']} nodes, at most 256 are possible"
        return ""

    def _ours(self, given: dict[str, Any], out: Any, qo_indptr: Any) -> None:
        """Our kernel on the call's tensors."""
        mask = given["custom_mask"]
        visible: dict[str, Any] = {}
        if mask is not None:
            visible = {"full_mask": mask.view(torch.uint8), "mask_indptr": given["mask_indptr"]}
        verify_attn_paged(
            given["q_extend"],
            given["k_buffer"][:, 0],
            draft_kv=given["k_extend"][:, 0],
            qo_indptr=qo_indptr,
            kv_indptr=given["kv_indptr"],
            kv_indices=given["kv_indices"],
            max_q_len=int(given["max_len_extend"]),
            sm_scale=self._scale(given),
            logit_cap=float(given["logit_cap"] or 0.0),
            d_latent=given["v_extend"].shape[-1],
            out=out,
            library=self._library,
            **visible,
        )

    @staticmethod
    def _scale(given: dict[str, Any]) -> float:
        scale = given["sm_scale"]
        return float(given["q_extend"].shape[-1] ** -0.5 if scale is None else scale)

    def _eager(self, layer_id: int, given: dict[str, Any]) -> None:
        serving = self.parity.serving
        counters, out = self.parity.counters, given["o_extend"]
        if not serving and not self._compares:
            counters["served by SGLang"] += 1
            self._incumbent(**given)
            return
        ours = out if serving else torch.empty_like(out)
        try:
            self._ours(given, ours, given["qo_indptr"])
        except KernelError as error:
            self.parity.fall_back(str(error), error=True)
            self._incumbent(**given)
            return
        counters["served by kdtree-engine" if serving else "served by SGLang"] += 1
        if serving and not self._compares:
            return
        theirs = torch.empty_like(out) if serving else out
        self._incumbent(**(given | {"o_extend": theirs}))
        self._compare(layer_id, ours, theirs, given["qo_indptr"])

    def _compare(self, layer_id: int, ours: Any, theirs: Any, qo_indptr: Any) -> None:
        """Adds to what was found about a layer, on the device. Rows behind the last request are nobody's."""
        live = (torch.arange(len(ours), device=ours.device) < qo_indptr[-1])[:, None, None]
        left, right = (torch.where(live, tensor, 0).float() for tensor in (ours, theirs))
        difference, reference = left - right, right.norm(dim=-1)
        least = torch.finfo(torch.float32).tiny
        rows = difference.norm(dim=-1) / reference.clamp_min(least)
        worst = torch.stack(
            [difference.norm() / reference.norm().clamp_min(least), rows.amax(), difference.abs().amax()]
        )
        found = self._found[layer_id]
        found[0] += live.any()
        # maximum, unlike amax of a stack, keeps NaN.
        found[1:] = torch.maximum(found[1:], worst)

    def _captured(self, layer_id: int, given: dict[str, Any]) -> None:
        """Both kernels and the choice between them, for a graph; the incumbent alone where ours refuses."""
        out, scratch = given["o_extend"], torch.zeros_like(given["o_extend"])
        ours, theirs, used = self._switches
        qo_indptr, kv_indptr = given["qo_indptr"], given["kv_indptr"]
        if not self._indptr or self._indptr[0] is not qo_indptr:
            self._indptr = (qo_indptr, qo_indptr * ours, qo_indptr * theirs, kv_indptr * theirs)
        _, our_qo, their_qo, their_kv = self._indptr
        try:
            self._ours(given, scratch, our_qo)
        except KernelError as error:
            self.parity.fall_back(str(error), error=True)
            self._incumbent(**given)
            return
        out.zero_()
        self._incumbent(**(given | {"qo_indptr": their_qo, "kv_indptr": their_kv}))
        # Nothing is live in the comparison unless both ran.
        self._compare(layer_id, scratch, out, our_qo * theirs)
        torch.where(used > 0, scratch, out, out=out)

    def _between_steps(self, batch: Any) -> None:
        """Decides about the next step, sets the switches of captured graphs, and reads what earlier steps found."""
        self._indptr = ()
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._collect()
        state, mode = self.parity, getattr(batch, "forward_mode", None)
        if mode is not None and not mode.is_target_verify():
            return
        self._compares = state.compares()
        ours = state.mode != "off" and (state.serving or self._compares)
        wanted = (int(ours), int(not state.serving or self._compares), int(state.serving))
        if wanted != self._set:
            self._set = wanted
            self._switches.copy_(torch.tensor(wanted, dtype=torch.int32), non_blocking=True)

    def _collect(self) -> None:
        """Takes over what was found, once its copy to the host is done, and starts the next copy."""
        if self._ready is not None and not self._ready.query():
            return
        if self._read is not None:
            figures = self._read.tolist()
            for layer_id, (calls, rel_l2, row_rel_l2, max_abs) in enumerate(figures):
                if calls:
                    self.parity.compared(layer_id, int(calls), rel_l2, row_rel_l2, max_abs)
            if any(calls for calls, *_ in figures):
                self.parity.log.write("counters", counters=dict(self.parity.counters))
            self.parity.promote(self._num_layers)
        if self._found.is_cuda:
            self._read = torch.empty(self._found.shape, pin_memory=True)
            self._read.copy_(self._found, non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            self._read = self._found.clone()
        self._found.zero_()


def _between(name: str) -> Callable[..., Any]:
    parent = getattr(TritonAttnBackend, name)

    def prepare(self: KDTreeMLAVerifyBackend, *args: Any, **kwargs: Any) -> Any:
        self._between_steps(args[0] if args else kwargs.get("forward_batch"))
        return parent(self, *args, **kwargs)

    prepare.__name__, prepare.__doc__ = name, parent.__doc__
    return prepare


# Releases differ in which of these they have; each begins a step.
for _name in [name for name in dir(TritonAttnBackend) if name.startswith("init_forward_metadata")]:
    if not _name.endswith("in_graph"):
        setattr(KDTreeMLAVerifyBackend, _name, _between(_name))
