"""Tree-verify attention for MLA models: owned kernels, their proof, and the bindings.

Importing this package loads neither torch nor a shared library; the first call of a kernel does.
"""

from __future__ import annotations

from kdtree_engine._native import KernelInfo, library
from kdtree_engine.errors import BundleError, KdtreeError, KernelError, ToolchainError
from kdtree_engine.ops.verify_attn import verify_attn

__version__ = "0.1.0"

__all__ = [
    "BundleError",
    "KdtreeError",
    "KernelError",
    "KernelInfo",
    "ToolchainError",
    "library",
    "verify_attn",
]
