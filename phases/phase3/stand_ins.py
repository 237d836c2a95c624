"""What SGLang needs to be imported on a machine without CUDA, and a repair of Triton's interpreter.

Nothing here replaces what a verify step runs, but for the interpreter's product of bfloat16 tiles.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

import numpy as np
import torch


def install() -> None:
    """Call before SGLang is imported."""
    _import_only("IPython.display", "HTML", "display")
    if torch.cuda.is_available():
        names = ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs")
        renorm = ("top_k_renorm_probs", "top_p_renorm_probs", "top_k_renorm_prob", "top_p_renorm_prob")
        _import_only("flashinfer.sampling", *names, *renorm)
    else:
        _mend_bfloat16_products()
    _torchvision_operators()
    _tolerate_known_models()


def _import_only(module: str, *names: str) -> None:
    """A module whose functions raise. Its parent package stays absent, so that asking for it still finds nothing."""
    if module in sys.modules or importlib.util.find_spec(module.partition(".")[0]) is not None:
        return
    made = types.ModuleType(module)
    for name in names:

        def raises(*_: Any, _name: str = f"{module}.{name}", **__: Any) -> None:
            raise NotImplementedError(f"{_name} stands in for an import only")

        setattr(made, name, raises)
    sys.modules[module] = made


def _torchvision_operators() -> None:
    """A torchvision built for another torch imports once two operators have a schema."""
    try:
        importlib.import_module("torchvision")
        return
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    for name in ("nms", "qnms"):
        try:
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        except RuntimeError:
            continue  # it is there already
    importlib.import_module("torchvision")


def _tolerate_known_models() -> None:
    """A newer transformers knows models that an older SGLang registers itself."""
    from transformers.models.auto import configuration_auto

    kind = type(configuration_auto.CONFIG_MAPPING)
    register = kind.register
    kind.register = lambda self, key, value, exist_ok=False: register(self, key, value, exist_ok=True)


def _mend_bfloat16_products() -> None:
    """Triton's interpreter multiplies bfloat16 tiles as the integers that hold them; float32 holds the same numbers."""
    import triton.language as tl
    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def widened(tile: Any) -> Any:
        if tile.dtype.scalar != tl.bfloat16:
            return tile
        bits = np.ascontiguousarray(tile.data).astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def mended(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), c, *rest)

    interpreter.InterpreterBuilder.create_dot = mended


def engine() -> None:
    """What an engine asks for beyond the attention: where there is no CUDA, SGLang's own Triton kernels of a round."""
    if torch.cuda.is_available():
        # Imported with the backends of sparse attention when a draft worker captures its graphs; none of it is called.
        os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "0"
        sys.modules.setdefault("deep_gemm", types.ModuleType("deep_gemm"))
        return
    rope = types.ModuleType("vllm._custom_ops")
    vars(rope)["rotary_embedding"] = None  # imported, never called: the native rope runs
    sys.modules["vllm._custom_ops"] = rope
    torch.cuda.synchronize = lambda *_, **__: None


def round_without_cuda() -> None:
    """A plugin of the tests' own: tree build, greedy walk and cache locations by SGLang's Triton kernels."""
    if torch.cuda.is_available():
        return
    for name, flag in (
        ("sglang.kernels.ops.speculative.spec_tree", "_is_xpu"),
        ("sglang.srt.speculative.eagle_utils", "_is_xpu"),
        ("sglang.kernels.ops.speculative.cache_locs", "_is_cuda"),
    ):
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue  # another release has it elsewhere
        if hasattr(module, flag):
            setattr(module, flag, True)
