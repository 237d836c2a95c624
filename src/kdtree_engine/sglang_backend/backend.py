"""The attention backend: SGLang's Triton backend, whose kernel of target-verify steps is replaced or accompanied.

The parent writes the cache, builds the metadata and calls `self.extend_attention_fwd` with tensors; that attribute is
where ours stands. In a step that ours cannot serve, for a reason that is said once, the parent's kernel gets the call
unchanged.

In a CUDA graph both kernels are captured, and which of them does anything is decided by tensors that the host fills
between steps: a kernel whose requests are all empty reads no key. So the mode may change without capturing again. A
served replay then costs the launch of an incumbent and of a judge that have nothing to do.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from kdtree_engine._native import library
from kdtree_engine.errors import KernelError
from kdtree_engine.ops.verify_attn_paged import verify_attn_paged
from kdtree_engine.sglang_backend import device, parity
from kdtree_engine.sglang_backend.metrics import Metrics
from kdtree_engine.sglang_backend.recorder import MAX_NODES, Limits, Recorder, Step

if TYPE_CHECKING:
    from collections.abc import Callable

# The tree builder of these algorithms asks the backend for the form of the mask.
_ASK_FOR_MASK = {"EAGLE", "EAGLE3", "STANDALONE"}
_MAX_TREE = 256
# Errors after which the device is well: the incumbent serves the step.
_SURVIVED = (KernelError, torch.OutOfMemoryError)
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
        recorder: captures steps, where that is asked for.
    """

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        self.parity = parity.shared()
        self._incumbent = self.extend_attention_fwd  # type: ignore[has-type]
        self._signature = inspect.signature(inspect.unwrap(self._incumbent))
        self.extend_attention_fwd = self._verify_or_not
        config, server = model_runner.model_config, model_runner.server_args
        self._num_layers = int(config.num_hidden_layers)
        self._model_type = str(getattr(getattr(config, "hf_config", None), "model_type", ""))
        self._refused = self._why_never(model_runner)
        if self._refused:
            self.parity.fall_back(self._refused)
        algorithm = str(getattr(server, "speculative_algorithm", None)).upper()
        self._may_compact = not self._refused and algorithm in _ASK_FOR_MASK
        if getattr(server, "enable_metrics", False) and self.parity.metrics is None:
            self.parity.metrics = Metrics(int(getattr(model_runner, "tp_rank", 0)))
        self._call: tuple[Any, Any] | None = None
        # Of the present step: whether it is compared, whether ours is used; when it began, if it verifies.
        self._compares, self._serves, self._began = False, False, -1.0
        self._clean_batches: set[int] = set()  # sizes of which a step was compared
        self._of_step: dict[str, Any] = {}  # tensors that the layers of a step share
        self._last_layer = -1
        self._compact = False  # the mask is n x n a request
        self._full_mask: Any = None
        here = torch.device(self.device)
        # ours runs, the incumbent runs, ours is used
        self._switches = torch.zeros(3, dtype=torch.int32, device=here)
        self._both = torch.ones(3, dtype=torch.int32, device=here)
        self._set = (-1, -1, -1)
        self._found = torch.zeros(self._num_layers, device.FOUND, device=here)
        limits = None if self._refused else Limits.from_environment()
        self.recorder: Recorder | None = None
        self._latch: device.Latch | None = None
        self._armed = (0, 0)
        if limits is not None:
            self.recorder = Recorder(limits, self.parity.log.write)
            width = config.kv_lora_rank + config.qk_rope_head_dim
            self._latch = device.Latch(here, self.num_head, width, MAX_NODES, limits.keys, _MAX_TREE)
        # What the host reads of them, between steps; of pinned memory, so that the copy waits for nobody.
        self._read = torch.zeros(self._found.numel() + device.WORDS, pin_memory=self._found.is_cuda)
        self._reading: Any = None
        self._unread = False  # something was compared or may have been kept since the last copy

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
        if self.num_draft_tokens is not None and self.num_draft_tokens > _MAX_TREE:
            return f"trees of {self.num_draft_tokens} nodes, at most {_MAX_TREE} are possible"
        try:
            self._library = library("cuda" if torch.device(self.device).type == "cuda" else "host")
        except KernelError as error:
            return str(error)
        return ""

    def init_cuda_graph_state(self, *args: Any, **kwargs: Any) -> None:
        """The parent's, with a mask of n x n a request where the release lets a backend own its mask.

        The tree builder then fills n x n cells a request in a step, not n x the longest context.
        """
        super().init_cuda_graph_state(*args, **kwargs)
        full = getattr(self, "_verify_mask", None)
        if full is None or not self._may_compact:
            return
        from sglang.srt.layers.attention.verify_mask import VerifyMask
        from sglang.srt.speculative.eagle_utils import TreeMaskMode

        # At capture SGLang copies a placeholder in: a full mask of prefixes of one key.
        size = full.max_bs * self.num_draft_tokens * (self.num_draft_tokens + 1)
        buffer = torch.zeros(size, dtype=torch.uint8, device=full.buffer.device)
        self._full_mask = full.buffer
        self._verify_mask = VerifyMask(buffer=buffer, mode=TreeMaskMode.QLEN_ONLY, max_bs=full.max_bs)
        self._compact = True

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
        if layer.layer_id <= self._last_layer:
            self._of_step = {}
        self._last_layer = layer.layer_id
        self.parity.counters["verify calls"] += 1
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not len(given["q_extend"]):
            # A rank that has no request; SGLang's kernel has a grid for that.
            self._incumbent(*args, **kwargs)
            return
        reason = self._refused or self._why_not(given)
        if reason:
            self.parity.fall_back(reason)
            self._theirs(given)
            return
        if given["q_extend"].is_cuda and torch.cuda.is_current_stream_capturing():
            self._captured(layer.layer_id, given)
        else:
            self._eager(layer.layer_id, given)
        if self._latch is not None:
            found = self._found[layer.layer_id]
            self._latch.offer(given, layer.layer_id, found, parity.ROW_REL_L2, compact=self._compact)
            self._facts = {"d_latent": given["v_extend"].shape[-1], "sm_scale": self._scale(given)}

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
        if not 1 <= int(given["max_len_extend"]) <= _MAX_TREE:
            return f"trees of {given['max_len_extend']} nodes, at most {_MAX_TREE} are possible"
        return ""

    def _ours(self, given: dict[str, Any], out: Any, qo_indptr: Any) -> None:
        """Our kernel on the call's tensors."""
        mask = given["custom_mask"]
        visible: dict[str, Any] = {}
        if mask is not None:
            mask = mask.view(torch.uint8)
            visible = {"mask": mask} if self._compact else {"full_mask": mask, "mask_indptr": given["mask_indptr"]}
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

    def _theirs(self, given: dict[str, Any], **changes: Any) -> None:
        """The incumbent's kernel on the call's tensors. A mask of n x n a request is spread out for it before."""
        mask = given["custom_mask"]
        if mask is not None and self._compact:
            changes["custom_mask"] = self._spread(given)
        self._incumbent(**(given | changes))

    def _spread(self, given: dict[str, Any]) -> Any:
        """The mask as n x (prefix + n) a request, once a step. The columns of the prefix are not read, nor written."""
        mask, indptr, kv_indptr = given["custom_mask"], given["mask_indptr"], given["kv_indptr"]
        if "mask" in self._of_step:
            return self._of_step["mask"]
        n, batch = int(given["max_len_extend"]), len(kv_indptr) - 1
        prefix = kv_indptr.diff().long()[:, None, None]
        steps = torch.arange(n, device=mask.device)
        at = indptr[:-1, None, None] + steps[:, None] * (prefix + n) + prefix + steps
        room = self._full_mask
        if room is None or not self._verify_mask.fits(batch):
            room = torch.empty(batch * n * (self.max_context_len + n), dtype=torch.uint8, device=mask.device)
        room[at.reshape(-1)] = mask.view(torch.uint8)[: batch * n * n]
        self._of_step["mask"] = room
        return room

    def _eager(self, layer_id: int, given: dict[str, Any]) -> None:
        serves, counters, out = self._serves, self.parity.counters, given["o_extend"]
        if not serves and not self._compares:
            counters["served by SGLang"] += 1
            self._theirs(given)
            return
        ours = out if serves else torch.empty_like(out)
        try:
            self._ours(given, ours, given["qo_indptr"])
        except _SURVIVED as error:
            self.parity.fall_back(str(error).partition("\n")[0], error=True)
            self._theirs(given)
            return
        counters["served by kdtree-engine" if serves else "served by SGLang"] += 1
        if serves and not self._compares:
            return
        theirs = torch.empty_like(out) if serves else out
        self._theirs(given, o_extend=theirs)
        device.settle(ours, theirs, given["qo_indptr"], self._both, self._found[layer_id], chooses=False)
        self._unread = True

    def _captured(self, layer_id: int, given: dict[str, Any]) -> None:
        """Both kernels and the choice between them, for a graph; the incumbent alone where ours refuses."""
        out, scratch = given["o_extend"], torch.empty_like(given["o_extend"])
        qo_indptr, kv_indptr = given["qo_indptr"], given["kv_indptr"]
        if "indptr" not in self._of_step:
            ours, theirs, _ = self._switches
            self._of_step["indptr"] = qo_indptr * ours, qo_indptr * theirs, kv_indptr * theirs
        our_qo, their_qo, their_kv = self._of_step["indptr"]
        try:
            self._ours(given, out, our_qo)
        except _SURVIVED as error:
            self.parity.fall_back(str(error).partition("\n")[0], error=True)
            self._theirs(given)
            return
        self._theirs(given, o_extend=scratch, qo_indptr=their_qo, kv_indptr=their_kv)
        device.settle(out, scratch, qo_indptr, self._switches, self._found[layer_id], chooses=True)

    def _between_steps(self, batch: Any) -> None:
        """Decides about the next step, sets the switches of captured graphs, and reads what earlier steps found."""
        self._of_step = {}
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._collect()
        state, mode = self.parity, getattr(batch, "forward_mode", None)
        now, began, self._began = time.perf_counter(), self._began, -1.0
        if mode is not None and not mode.is_target_verify():
            return
        if began >= 0 and state.mode != "off":
            state.budget.took(now - began, compared=self._compares)
        self._began = now
        size = int(getattr(batch, "batch_size", 0))
        # A size of batch, which is a graph of its own, is served by itself only after a comparison.
        new = state.mode == "auto" and size not in self._clean_batches
        self._compares = state.compares() or (new and state.serving)
        self._serves = state.serving and not new
        if self._compares:
            self._clean_batches.add(size)
        wanted = (int(self._serves or self._compares), int(not self._serves or self._compares), int(self._serves))
        if wanted != self._set:
            self._set = wanted
            self._switches.copy_(torch.tensor(wanted, dtype=torch.int32), non_blocking=True)
        self._unread |= self._compares
        self._arm()
        if state.metrics is not None:
            state.metrics.update(state.counters, serving=state.serving)

    def _arm(self) -> None:
        """Tells the latch what to keep of the next step."""
        recorder, latch = self.recorder, self._latch
        if recorder is None or latch is None:
            return
        layer = recorder.wanted()
        watch = int(recorder.watches and self.parity.mode == "auto")
        wanted = (0 if layer is None else layer + 1, watch)
        if wanted != self._armed:
            self._armed = wanted
            latch.state[:2].copy_(torch.tensor(wanted, dtype=torch.int32), non_blocking=True)
        self._unread |= layer is not None

    def _collect(self) -> None:
        """Takes over what was found, once its copy to the host is done, and starts the next copy."""
        if self._reading is not None:
            if not self._reading.query():
                return
            self._reading = None
            self._take()
        if not self._unread:
            return
        self._unread = False
        figures = self._found.numel()
        self._read[:figures].copy_(self._found.view(-1), non_blocking=True)
        if self._latch is not None:
            self._read[figures:].copy_(self._latch.state, non_blocking=True)
        self._found.zero_()
        self._reading = torch.cuda.Event() if self._found.is_cuda else _Done()
        self._reading.record()

    def _take(self) -> None:
        """What the last copy says: figures of layers, and whether a step was kept."""
        figures = self._found.numel()
        any_calls = False
        for layer_id, row in enumerate(self._read[:figures].view(-1, device.FOUND).tolist()):
            calls, squares, reference, worst_row, worst_element = row
            if calls:
                any_calls = True
                rel_l2 = (squares / max(reference, 1e-37)) ** 0.5
                if not self.parity.compared(layer_id, int(calls), rel_l2, worst_row, worst_element):
                    self._clean_batches.clear()
        if any_calls:
            self.parity.log.write("counters", counters=dict(self.parity.counters))
            self.parity.promote(self._num_layers)
        if kept := int(self._read[figures + device.KEPT]):
            self._harvest(kept)

    def _harvest(self, kept: int) -> None:
        """Hands the step that the latch keeps to the recorder, and opens the latch again."""
        recorder, latch = self.recorder, self._latch
        assert recorder is not None
        assert latch is not None
        arrays = latch.read()
        if arrays is None:
            recorder.skip(f"the step has more than {latch.max_nodes} nodes or {latch.max_keys} keys")
        else:
            facts: dict[str, Any] = {"layer": abs(kept) - 1, "why": "asked for" if kept > 0 else "breach"}
            recorder.put(Step(**arrays, **facts, **self._facts, model_type=self._model_type))
        latch.state.zero_()
        self._armed = (0, 0)


class _Done:
    """An event of a device that is never behind."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


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
