"""Byte corpus: the `.py` files of a Python standard library, split by file."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BOS = 256
EOS = 258
VOCAB_SIZE = 260
HELD_OUT_SHARE = 1 / 20

# Third-party code has other licences and differs between machines.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Corpus:
    """Token streams of the two halves of the split; every file is BOS followed by its bytes.

    Attributes:
        train: int16 [num_train_tokens].
        held_out: int16 [num_held_out_tokens].
        description: counts and a digest of the whole text, for the training log.
    """

    train: np.ndarray
    held_out: np.ndarray
    description: dict[str, object]


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Tell on which side of the split a file lies, from its path relative to the corpus folder.

    A hash of the path, not of the content: the side stays the same between Python versions.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def files(folder: Path) -> list[str]:
    """List the corpus files below `folder` as sorted relative POSIX paths."""
    return sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts)
    )


def text(path: Path) -> bytes | None:
    """Read one file, or None where it is empty or not UTF-8 text (encoding test data is not)."""
    data = path.read_bytes()
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return data or None


def load(folder: Path) -> Corpus:
    """Read every corpus file below `folder`.

    Raises:
        ValueError: the folder holds no text for one of the two sides.
    """
    sides: dict[bool, list[np.ndarray]] = {False: [], True: []}
    digest = hashlib.sha256()
    for name in files(folder):
        data = text(folder / name)
        if data is None:
            continue
        digest.update(name.encode() + b"\0" + data)
        tokens = np.empty(len(data) + 1, np.int16)
        tokens[0] = BOS
        tokens[1:] = np.frombuffer(data, np.uint8)
        sides[is_held_out(name)].append(tokens)
    if not sides[False] or not sides[True]:
        raise ValueError(f"corpus folder {folder} has no *.py text on both sides of the split")
    train, held_out = np.concatenate(sides[False]), np.concatenate(sides[True])
    description: dict[str, object] = {
        "train_files": len(sides[False]),
        "train_tokens": len(train),
        "held_out_files": len(sides[True]),
        "held_out_tokens": len(held_out),
        "sha256": digest.hexdigest(),
    }
    return Corpus(train, held_out, description)
