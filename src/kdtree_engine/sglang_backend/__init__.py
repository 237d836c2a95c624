"""SGLang with kdtree-engine's verify attention: beside its own kernel first, then instead of it.

`KDTreeMLAVerifyBackend` is SGLang's Triton backend in everything but the attention of target-verify steps of MLA
models: that goes through `verify_attn_flash_paged`, on SGLang's own tensors. `parity` has the modes.

Nothing of SGLang or torch is imported before it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdtree_engine.sglang_backend.plugin import BACKEND_NAME, register

if TYPE_CHECKING:
    from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend
    from kdtree_engine.sglang_backend.parity import get_mode, set_mode

__all__ = ["BACKEND_NAME", "KDTreeMLAVerifyBackend", "get_mode", "register", "set_mode"]


def __getattr__(name: str) -> Any:
    if name == "KDTreeMLAVerifyBackend":
        from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend

        return KDTreeMLAVerifyBackend
    if name in ("get_mode", "set_mode"):
        from kdtree_engine.sglang_backend import parity

        return getattr(parity, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
