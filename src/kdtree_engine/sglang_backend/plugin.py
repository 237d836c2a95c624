"""The plugin: SGLang finds it by the entry point group sglang.srt.plugins and calls it in every process it starts."""

from __future__ import annotations

import os
import re
from typing import Any

from kdtree_engine.errors import KdtreeError

BACKEND_NAME = "kdtree_mla"
# The first and the first later release whose interfaces the backend is not written for.
VERSIONS = ("0.5.12", "0.5.24")
# "triton": the class behind --attention-backend triton is ours too, so that SGLang's checks on that name hold.
REPLACE = "KDTREE_ENGINE_REPLACE"


def check_version(version: str) -> None:
    """Raises KdtreeError for a release of SGLang that the backend is not written for."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    first, last = (tuple(map(int, bound.split("."))) for bound in VERSIONS)
    if not first <= numbers < last:
        raise KdtreeError(
            f"sglang: got version {version}, expected {VERSIONS[0]} or later and before {VERSIONS[1]}; install such a "
            f"one, or leave --attention-backend {BACKEND_NAME} out"
        )


def register() -> None:
    """Adds `kdtree_mla` to SGLang's attention backends.

    Raises:
        KdtreeError: this release of SGLang is not supported.
    """
    import sglang
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    check_version(sglang.__version__)
    try:
        from sglang.srt.arg_groups.choices import add_attention_backend_choices
    except ImportError:  # before 0.5.23
        from sglang.srt.server_args import add_attention_backend_choices
    if BACKEND_NAME not in ATTENTION_BACKENDS:
        add_attention_backend_choices([BACKEND_NAME])
        register_attention_backend(BACKEND_NAME)(_create)
    if os.environ.get(REPLACE) == "triton":
        ATTENTION_BACKENDS["triton"] = _create
    _verify_chains_without_a_mask()


def _verify_chains_without_a_mask() -> None:
    """DFlash drafts chains; SGLang knows by the names of classes which backends need no mask for that."""
    from sglang.srt.speculative import dflash_utils

    name = "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"
    if known := getattr(dflash_utils, name, None):
        setattr(dflash_utils, name, known | {"KDTreeMLAVerifyBackend"})


def _create(runner: Any) -> Any:
    from kdtree_engine.sglang_backend.backend import KDTreeMLAVerifyBackend

    return KDTreeMLAVerifyBackend(runner)
