"""Tree-verify attention for MLA models: owned kernels, their proof, and the bindings.

Importing this package loads neither torch nor a shared library; the first call of a kernel does.
"""

from __future__ import annotations

from kdtree_engine._native import KernelInfo, library
from kdtree_engine.errors import BundleError, KdtreeError, KernelError, ToolchainError
from kdtree_engine.ops.kv_compact import Compaction, kv_compact, pool_addresses
from kdtree_engine.ops.merge_partials import merge_partials
from kdtree_engine.ops.tree_accept import Acceptance, tree_accept, tree_accept_workspace_size
from kdtree_engine.ops.tree_build import DraftTree, tree_build
from kdtree_engine.ops.verify_attn import verify_attn
from kdtree_engine.ops.verify_attn_paged import verify_attn_paged, verify_attn_paged_workspace_size
from kdtree_engine.request_status import RequestStatus

__version__ = "0.1.0"

__all__ = [
    "Acceptance",
    "BundleError",
    "Compaction",
    "DraftTree",
    "KdtreeError",
    "KernelError",
    "KernelInfo",
    "RequestStatus",
    "ToolchainError",
    "kv_compact",
    "library",
    "merge_partials",
    "pool_addresses",
    "tree_accept",
    "tree_accept_workspace_size",
    "tree_build",
    "verify_attn",
    "verify_attn_paged",
    "verify_attn_paged_workspace_size",
]
