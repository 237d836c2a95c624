"""Environment variables of the backend, read once; one that makes no sense is refused with one line."""

from __future__ import annotations

import math
import os

from kdtree_engine.errors import KdtreeError


def share(name: str, default: float, *, most: float = 1.0) -> float:
    """A number from 0 to `most`."""
    text = os.environ.get(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise KdtreeError(f"{name}: got {text!r}, expected a number from 0 to {most:g}")
    return value


def count(name: str, default: int) -> int:
    """A whole number of at least 1."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not int(text):
        raise KdtreeError(f"{name}: got {text!r}, expected a whole number of at least 1")
    return int(text)
