"""Weights of a folder: a config as JSON and tensors as safetensors, as float32 NumPy arrays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors

from kdtree_engine.bundle import from_bfloat16
from kdtree_engine.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[Any]

_STORED = {"BF16": "<u2", "F32": "<f4", "F16": "<f2"}


def read_weights(folder: Path, tensors: str, config: str) -> tuple[dict[str, Array], dict[str, Any]]:
    """The tensors of `folder`/`tensors` by name, float32, and the object in `folder`/`config`.

    Raises:
        DecodeError: a file is missing or damaged, or holds another type than bfloat16, float16 and float32.
    """
    try:
        settings = json.loads((folder / config).read_text())
        entries = safetensors.deserialize((folder / tensors).read_bytes())  # type: ignore[no-untyped-call]
    except OSError as error:
        raise DecodeError(
            "model", f"cannot read {error.filename}: {error.strerror}; restore it or take another"
        ) from None
    except (ValueError, safetensors.SafetensorError) as error:
        line = " ".join(str(error).split())
        raise DecodeError("model", f"a file is damaged, {line}; restore it or take another") from None
    return {name: _tensor(name, entry) for name, entry in entries}, settings


def _tensor(name: str, entry: Mapping[str, Any]) -> Array:
    if entry["dtype"] not in _STORED:
        raise DecodeError("model", f"{name} is {entry['dtype']}, expected one of {', '.join(_STORED)}; convert it")
    values: Array = np.frombuffer(entry["data"], _STORED[entry["dtype"]]).reshape(entry["shape"])
    return from_bfloat16(values) if entry["dtype"] == "BF16" else values.astype(np.float32)
