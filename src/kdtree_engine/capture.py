"""Capture: record a tree-verify step of a transformers MLA model and store it as a bundle.

    step = verify_step(model, prefix, tokens, parents)        # prefix cache, tree mask, positions
    bundle.write("one.h5", to_bundle([step], name="one"))

Recorded for every layer: the absorbed query, the latent key rows as they lie in the model's cache, and the input of
the model's own `o_proj`. The model expands keys and values per head and never absorbs, so the last is an independent
witness; a step whose absorbed attention disagrees with it is refused. torch and transformers are imported on first use.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import inspect
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kdtree_engine import bundle
from kdtree_engine.errors import BundleError, KdtreeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kdtree_engine.bundle import Array, Bundle, Drafter

# Plain dense MLA. Relatives that select keys (DSA) or scale the query and latent after projection are not in the list,
# because their attention is not a function of the query and the latent rows alone. Kimi K2.x is a deepseek_v3.
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
# Only these take an additive tree mask; a flash implementation ignores it, a custom one may drop the causal mask.
ATTENTION = ("eager", "sdpa")
# Relative L2 distance of the absorbed attention from the model's own, by the model's dtype. Ten times what right
# captures measure (float64 is bounded by the model's float32 softmax); a wrong layout, rotation or scale gives > 0.01.
AGREEMENT = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


class CaptureError(BundleError):
    """A model or a request that cannot be captured. `argument` names the culprit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Attention:
    """One layer of a verify step, float32 (float64 where the model is float64).

    Attributes:
        q: absorbed and rotated queries [n, H, d_latent + d_rope].
        kv: latent rows, the prefix in order and then the nodes [P + n, d_latent + d_rope]. Rotary pair j of both is
            columns j and j + d_rope / 2 of the rope part, whichever way the model stores it.
        attn: input of the model's own `o_proj` [n, H * v].
    """

    q: Array
    kv: Array
    attn: Array


@dataclass(frozen=True, eq=False, kw_only=True)
class VerifyStep:
    """A verify step of one request as the model ran it.

    Attributes:
        prefix: int32 [P], the committed tokens.
        tokens, parents, depths: int32 [n]; node 0 is the root, its parent is -1.
        visibility: uint8 [n, n], row i is 1 at i and its ancestors.
        layers: the attention of every layer.
        logits: float32 or float64 [n, V].
        num_heads, d_latent, d_rope, sm_scale: the attention's geometry.
        model_type: transformers' name of the architecture.
    """

    prefix: Array
    tokens: Array
    parents: Array
    depths: Array
    visibility: Array
    layers: tuple[Attention, ...]
    logits: Array
    num_heads: int
    d_latent: int
    d_rope: int
    sm_scale: float
    model_type: str


def verify_step(model: Any, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> VerifyStep:
    """Run one verify step of a transformers causal language model and record it.

    Args:
        model: a loaded model of one of MODEL_TYPES with eager or sdpa attention; it is left as it was.
        prefix: P >= 0 committed tokens, without the root.
        tokens: n >= 1 nodes; node 0 is the root, the last committed token, which is not yet in the cache.
        parents: for each node the index of its parent, which comes before it; -1 for the root.

    Raises:
        CaptureError: the model is of an unknown kind or cache layout, a token or parent is out of range, or the
            absorbed attention disagrees with the model's own.
    """
    import torch
    from transformers import DynamicCache

    config = model.config.get_text_config()
    attentions = _attentions(model, config)
    depths, visibility = _tree(tokens, parents)
    for name, values in (("prefix", prefix), ("tokens", tokens)):
        for index, token in enumerate(values):
            if not 0 <= token < config.vocab_size:
                raise CaptureError(
                    name, f"token {index} is {token}; expected 0..{config.vocab_size - 1}; check the tokenizer"
                )

    device, dtype = model.device, model.dtype
    cache = DynamicCache(config=config)
    run = partial(_forward, model, cache)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            if len(prefix):
                run(input_ids=torch.tensor([list(prefix)], device=device))
            hidden = np.pad(visibility == 0, ((0, 0), (len(prefix), 0)))
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            # Filled in place: a `where` with the lowest float64 as a scalar overflows.
            mask.masked_fill_(torch.from_numpy(hidden).to(device), torch.finfo(dtype).min)
            recorders = [_Recorder(attention) for attention in attentions]
            try:
                logits = run(
                    input_ids=torch.tensor([list(tokens)], device=device),
                    attention_mask=mask[None, None],
                    position_ids=torch.from_numpy(depths).long().to(device)[None] + len(prefix),
                )
            finally:
                for recorder in recorders:
                    recorder.remove()
            num_keys = len(prefix) + len(tokens)
            layers = tuple(
                recorder.attention(_latent_rows(cache, index, num_keys, attention))
                for index, (recorder, attention) in enumerate(zip(recorders, attentions, strict=True))
            )
    finally:
        model.train(was_training)

    first = attentions[0]
    step = VerifyStep(
        prefix=np.asarray(prefix, np.int32),
        tokens=np.asarray(tokens, np.int32),
        parents=np.asarray(parents, np.int32),
        depths=depths,
        visibility=visibility,
        layers=layers,
        logits=_numpy(logits[0]),
        num_heads=layers[0].q.shape[1],
        d_latent=int(first.kv_lora_rank),
        d_rope=int(first.qk_rope_head_dim),
        sm_scale=float(first.scaling),
        model_type=str(config.model_type),
    )
    _check_agreement(step, attentions, str(dtype).removeprefix("torch."))
    return step


def to_bundle(
    steps: Sequence[VerifyStep],
    *,
    name: str,
    page_size: int = 1,
    num_slots: int | None = None,
    kv_indices: Array | None = None,
    drafter: Drafter | None = None,
    model: str = "none",
    model_config: Mapping[str, Any] | None = None,
    model_seed: int | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Bundle:
    """Put verify steps of one model together as a bundle of one batch, without expected outputs.

    Args:
        steps: one for each request.
        name: the bundle's name, a-z, 0-9 and _.
        page_size: tokens in a page of the pool.
        num_slots: size of the pool; default: as many pages as the keys need.
        kv_indices: int64 [K], the pool slot of every key, request by request; default: in order from 0.
        drafter: what the trees were built from, where a tree builder made them.
        model, model_config, model_seed: where the weights can be had, as fixtures/README.md says.
        provenance: entries to add to the generator's own.

    Raises:
        CaptureError: the steps are not of one model.
        BundleError: the result is not a valid bundle.
    """
    if not steps:
        raise CaptureError("steps", "there is none; expected one for each request")
    first = steps[0]
    geometry = ("num_heads", "d_latent", "d_rope", "sm_scale", "model_type")
    for field in geometry:
        values = sorted({getattr(step, field) for step in steps})
        if len(values) > 1:
            raise CaptureError("steps", f"{field} differs between them: {values}; expected steps of one model")
    prefix_len = np.array([step.prefix.size for step in steps], np.int32)
    num_nodes = np.array([step.tokens.size for step in steps], np.int32)
    num_keys = int((prefix_len + num_nodes).sum())
    if num_slots is None:
        num_slots = -(-num_keys // page_size) * page_size
    if kv_indices is None:
        kv_indices = np.arange(num_keys, dtype=np.int64)

    def joined(field: str) -> Array:
        return np.concatenate([getattr(step, field).ravel() for step in steps])

    def layer_rows(index: int, field: str) -> Array:
        rows = np.concatenate([getattr(step.layers[index], field) for step in steps])
        return rows.astype(np.float32)

    indices = range(len(first.layers))
    made = bundle.Bundle(
        name=name,
        page_size=page_size,
        num_slots=num_slots,
        num_heads=first.num_heads,
        d_latent=first.d_latent,
        d_rope=first.d_rope,
        sm_scale=first.sm_scale,
        origin="captured",
        model=model,
        model_config=model_config,
        model_seed=model_seed,
        provenance={"generator": "kdtree_engine.capture", "model_type": first.model_type}
        | {"libraries": {package: importlib.metadata.version(package) for package in ("torch", "transformers")}}
        | dict(provenance or {}),
        request=bundle.Request(
            prefix_len=prefix_len,
            num_nodes=num_nodes,
            qo_indptr=_indptr(num_nodes),
            kv_indptr=_indptr(prefix_len + num_nodes),
            kv_indices=kv_indices,
        ),
        context=bundle.Context(tokens=joined("prefix")),
        tree=bundle.Tree(
            tokens=joined("tokens"),
            parents=joined("parents"),
            depths=joined("depths"),
            visibility=joined("visibility"),
        ),
        drafter=drafter,
        layers=tuple(
            bundle.Layer(
                q=bundle.to_bfloat16(layer_rows(index, "q")),
                kv=bundle.to_bfloat16(layer_rows(index, "kv")),
            )
            for index in indices
        ),
        witness=bundle.Witness(
            logits=np.concatenate([step.logits for step in steps]).astype(np.float32),
            attn=tuple(layer_rows(index, "attn") for index in indices),
        ),
    )
    bundle.validate(made)
    return made


def greedy_tree(model: Any, prefix: Sequence[int], root: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """Make a tree that exercises acceptance without a drafter: tokens [num_nodes] and parents [num_nodes].

    The model's own greedy continuation is the spine, and every spine node but the last also gets the second best token
    as a sibling of its child: one path to accept, one branch to reject at every depth.
    """
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config.get_text_config())
    tokens, parents, spine = [root], [-1], 0
    step = [*prefix, root]
    with torch.no_grad():
        while len(tokens) < num_nodes:
            logits = _forward(model, cache, input_ids=torch.tensor([step], device=model.device))
            best, second = logits[0, -1].topk(2).indices.tolist()
            children = [best, second][: num_nodes - len(tokens)]
            parents += [spine] * len(children)
            spine = len(tokens)
            tokens += children
            step = [best]
    return tokens, parents


def load_model(folder: Path, *, dtype: str = "float32") -> Any:
    """Load a causal language model from a local folder; nothing is fetched and no code in the folder is run.

    The folder holds config.json and either weights as transformers names them or one *.safetensors file named target.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise CaptureError("MODEL_DIR", f"{folder} has no config.json; expected a local folder of a transformers model")
    options = {"dtype": getattr(torch, dtype), "attn_implementation": "eager"}
    single = folder / "target.safetensors"
    try:
        if not single.is_file():
            return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, **options)
        from safetensors.torch import load_file

        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, **options)
        missing, unexpected = model.load_state_dict(load_file(single), strict=False)
        if unexpected or set(missing) - set(model.all_tied_weights_keys):
            raise ValueError(f"target.safetensors lacks {missing} and has unknown {unexpected}")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CaptureError("MODEL_DIR", f"cannot load {folder}: {reason}; check the folder") from error
    model.tie_weights()
    return model.eval()


def main(argv: Sequence[str] | None = None) -> int:
    """Capture one verify step of a local model: the command `kdtree-engine capture`."""
    parser = argparse.ArgumentParser(
        prog="kdtree-engine capture",
        description="Run a local MLA model on a prompt, verify one draft tree, and store the step as a bundle.",
        epilog="The tree is the model's own greedy continuation with the second best token beside every step of it.",
    )
    parser.add_argument("model_dir", metavar="MODEL_DIR", type=Path, help="folder of a transformers model")
    parser.add_argument("--prompt", type=Path, required=True, metavar="FILE", help="text (UTF-8) of the prompt")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the bundle")
    parser.add_argument("--name", help="name of the bundle; default: from the prompt file's name")
    parser.add_argument("--nodes", type=int, default=17, help="tree nodes with the root (default 17)")
    parser.add_argument("--max-prefix", type=int, default=4096, help="keep this many last tokens (default 4096)")
    parser.add_argument("--dtype", choices=sorted(AGREEMENT), default="float32", help="of the model (default float32)")
    parser.add_argument("--bytes", action="store_true", help="tokens are the bytes of the prompt, no tokenizer")
    parser.add_argument(
        "--model",
        choices=("none", "tiny_model"),
        default="none",
        help="name under which the repository ships the weights; without them only T0 can be checked (default none)",
    )
    args = parser.parse_args(argv)
    try:
        print(_capture_to(args))
    except KdtreeError as error:
        print(f"kdtree-engine capture: {error}", file=sys.stderr)
        return 1
    return 0


def _capture_to(args: argparse.Namespace) -> Path:
    if not 1 <= args.nodes <= bundle.MAX_NODES:
        raise CaptureError("--nodes", f"got {args.nodes}; expected 1..{bundle.MAX_NODES}")
    if args.max_prefix < 0:
        raise CaptureError("--max-prefix", f"got {args.max_prefix}; expected 0 or more")
    try:
        text = args.prompt.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CaptureError("--prompt", f"cannot read {args.prompt}: {error}; expected a UTF-8 text file") from error
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError("--out", f"cannot make {args.out}: {error.strerror}; choose another folder") from error
    name = args.name or "".join(c if c.isascii() and c.isalnum() else "_" for c in args.prompt.stem.lower())
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = load_model(args.model_dir, dtype=args.dtype)
    tokens = list(text.encode()) if args.bytes else _tokenize(args.model_dir, text)
    if not tokens:
        raise CaptureError("--prompt", f"{args.prompt} has no tokens; expected at least one, the root")
    *prefix, root = tokens[-args.max_prefix - 1 :]
    step = verify_step(model, prefix, *greedy_tree(model, prefix, root, args.nodes))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    path: Path = args.out / f"{name}.h5"
    bundle.write(path, to_bundle([step], name=name, model=args.model, provenance={"date": today, "dtype": args.dtype}))
    return path


def _tokenize(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(
            "MODEL_DIR", f"{folder} has no tokenizer; add one, or pass --bytes for a byte model"
        ) from error
    return [int(token) for token in tokenizer(text)["input_ids"]]


def _forward(model: Any, cache: Any, **inputs: Any) -> Any:
    """Logits of a forward pass on top of `cache`, which grows. transformers renamed the cache's argument."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return model(**inputs, **{name: cache}, use_cache=True).logits


def _attentions(model: Any, config: Any) -> list[Any]:
    """The attention module of every layer, once they are known to be plain MLA."""
    if config.model_type not in MODEL_TYPES:
        raise CaptureError(
            "model", f"its model_type is {config.model_type!r}; expected one of {', '.join(MODEL_TYPES)}"
        )
    if config._attn_implementation not in ATTENTION:
        raise CaptureError(
            "model",
            f"its attention is {config._attn_implementation!r}, which need not honour a tree mask; "
            f"load it with attn_implementation='eager'",
        )
    attentions = [layer.self_attn for layer in model.get_decoder().layers]
    needed = ("kv_b_proj", "o_proj", "scaling", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    for index, attention in enumerate(attentions):
        missing = [name for name in needed if not hasattr(attention, name)]
        if missing:
            raise CaptureError(
                "model", f"layer {index} has no {missing[0]}; this transformers release is not known; use 5.x"
            )
        if not attention.kv_b_proj.weight.is_floating_point():
            raise CaptureError("model", f"layer {index}: kv_b_proj is quantised; load it as bfloat16 or float32")
    scales = sorted({float(attention.scaling) for attention in attentions})
    if len(scales) > 1:
        raise CaptureError("model", f"its layers use different softmax scales {scales}; expected one")
    return attentions


def _tree(tokens: Sequence[int], parents: Sequence[int]) -> tuple[Array, Array]:
    """Depths int32 [n] and visibility uint8 [n, n]."""
    if not 1 <= len(tokens) <= bundle.MAX_NODES:
        raise CaptureError("tokens", f"there are {len(tokens)} nodes; expected 1..{bundle.MAX_NODES}, the root counted")
    if len(parents) != len(tokens):
        raise CaptureError("parents", f"got {len(parents)}; expected one for each of {len(tokens)} nodes")
    if parents[0] != -1:
        raise CaptureError("parents", f"the root has parent {parents[0]}; expected -1")
    depths = np.zeros(len(tokens), np.int32)
    visibility = np.eye(len(tokens), dtype=np.uint8)
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise CaptureError("parents", f"node {node} has parent {parent}; expected 0..{node - 1}")
        depths[node] = depths[parent] + 1
        visibility[node] |= visibility[parent]
    return depths, visibility


class _Recorder:
    """Hooks on one attention module: its query before absorption, the rotation, and what enters o_proj."""

    def __init__(self, attention: Any) -> None:
        self._module = attention
        self._seen: dict[str, Any] = {}
        query = attention.q_proj if attention.q_lora_rank is None else attention.q_b_proj
        self._handles = [
            attention.register_forward_pre_hook(self._keep_rotation, with_kwargs=True),
            query.register_forward_hook(self._keep_query),
            attention.o_proj.register_forward_pre_hook(self._keep_attn),
        ]

    def _keep_rotation(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._seen["rotation"] = kwargs.get("position_embeddings")

    def _keep_query(self, _module: Any, _args: Any, output: Any) -> None:
        self._seen["query"] = output

    def _keep_attn(self, _module: Any, args: tuple[Any, ...]) -> None:
        self._seen["attn"] = args[0]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def attention(self, kv: Array) -> Attention:
        """What the hooks saw, with the query absorbed in float64."""
        module = self._module
        if self._seen.get("rotation") is None:
            raise CaptureError(
                "model", "its attention gets no position_embeddings; this transformers release is not known"
            )
        query = self._seen["query"][0].double()
        query = query.view(query.shape[0], -1, module.qk_nope_head_dim + module.qk_rope_head_dim)
        nope, rope = query.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        up = _up_projection(module)[:, : module.qk_nope_head_dim]
        latent = (nope.transpose(0, 1) @ up).transpose(0, 1)
        rotation = self._seen["rotation"]
        rotated = _rotate(rope, rotation, getattr(module.config, "rope_interleave", True))
        absorbed = np.concatenate([_numpy(latent), _numpy(rotated)], axis=-1)
        if not isinstance(rotation, tuple):  # DeepseekV2 keeps the two of a pair side by side in its cache
            kv = np.concatenate([kv[:, : module.kv_lora_rank], *_even_odd(kv[:, module.kv_lora_rank :])], axis=-1)
        return Attention(q=absorbed.astype(kv.dtype), kv=kv, attn=_numpy(self._seen["attn"][0]))


def _up_projection(module: Any) -> Any:
    """kv_b_proj as float64 [H, nope + v, d_latent]."""
    width = module.qk_nope_head_dim + module.v_head_dim
    return module.kv_b_proj.weight.double().view(-1, width, module.kv_lora_rank)


def _rotate(rope: Any, rotation: Any, interleave: bool) -> Any:
    """Rotate queries [n, H, d_rope] as the model rotates its keys; pairs end up as [first halves | second halves]."""
    import torch

    half = rope.shape[-1] // 2
    if isinstance(rotation, tuple):
        cos, sin = (part[0, :, None, :half].double() for part in rotation)
        first, second = _even_odd(rope) if interleave else (rope[..., :half], rope[..., half:])
    else:  # DeepseekV2: complex factors on neighbouring pairs
        cos, sin = rotation[0, :, None].real.double(), rotation[0, :, None].imag.double()
        first, second = _even_odd(rope)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _even_odd(pairs: Any) -> tuple[Any, Any]:
    return pairs[..., 0::2], pairs[..., 1::2]


def _latent_rows(cache: Any, index: int, num_keys: int, attention: Any) -> Array:
    """The layer's rows [latent | rotated rope key] as they lie in the model's cache."""
    layer = cache.layers[index] if index < len(getattr(cache, "layers", ())) else None
    keys: Any = getattr(layer, "keys", None)
    values: Any = getattr(layer, "values", None)
    shapes = [list(getattr(part, "shape", ())) for part in (keys, values)]
    wanted = [[1, 1, num_keys, attention.kv_lora_rank], [1, 1, num_keys, attention.qk_rope_head_dim]]
    if shapes != wanted:
        raise CaptureError(
            "model",
            f"layer {index} caches keys and values of shapes {shapes}; expected the latent and the rope key, {wanted}; "
            f"use transformers 5.24 or a later 5.x",
        )
    return np.concatenate([_numpy(keys[0, 0]), _numpy(values[0, 0])], axis=-1)


def _check_agreement(step: VerifyStep, attentions: Sequence[Any], dtype: str) -> None:
    """Refuse a step whose absorbed attention is not what the model computed."""
    visible = np.pad(step.visibility != 0, ((0, 0), (step.prefix.size, 0)), constant_values=True)
    for index, (layer, module) in enumerate(zip(step.layers, attentions, strict=True)):
        q, kv = layer.q.astype(np.float64), layer.kv.astype(np.float64)
        scores = np.where(visible[:, None], q @ kv.T * step.sm_scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        latent = weights @ kv[:, : step.d_latent]
        up = _numpy(_up_projection(module))[:, module.qk_nope_head_dim :]
        ours = np.einsum("nhr,hvr->nhv", latent, up).reshape(layer.attn.shape)
        distance = np.linalg.norm(ours - layer.attn) / np.linalg.norm(layer.attn)
        if not distance <= AGREEMENT[dtype]:
            raise CaptureError(
                "model",
                f"layer {index}: absorbed attention is {distance:.1e} (relative L2) from the model's own; expected "
                f"at most {AGREEMENT[dtype]:.0e}; this {step.model_type} is not plain MLA as this release knows it",
            )


def _numpy(tensor: Any) -> Array:
    """A tensor as float32, float64 where it is float64."""
    tensor = tensor.detach().cpu()
    array: Array = (tensor if str(tensor.dtype) == "torch.float64" else tensor.float()).numpy()
    return array


def _indptr(counts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


if __name__ == "__main__":
    sys.exit(main())
