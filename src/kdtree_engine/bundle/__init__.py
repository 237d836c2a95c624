"""Bundles: one HDF5 file with the inputs, the expected outputs and the provenance of one verify step.

fixtures/README.md is the normative description of the file; the dataclasses here mirror it group by group, and the
metadata of their fields (axes, logical dtype) is what the reader checks and the writer stores. Nothing here computes
an expected output: that is the oracle's work.
"""

from __future__ import annotations

from kdtree_engine.bundle._checks import MAX_HEADS, MAX_KEYS, MAX_NODES, MODELS, ORIGINS, validate
from kdtree_engine.bundle._data import (
    Array,
    Bundle,
    Context,
    Drafter,
    Expected,
    Layer,
    Request,
    Spec,
    Tree,
    Witness,
    datasets,
    from_bfloat16,
    to_bfloat16,
)
from kdtree_engine.bundle._file import FORMAT, FORMAT_VERSION, digest, find, read, replace_file, write

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MAX_HEADS",
    "MAX_KEYS",
    "MAX_NODES",
    "MODELS",
    "ORIGINS",
    "Array",
    "Bundle",
    "Context",
    "Drafter",
    "Expected",
    "Layer",
    "Request",
    "Spec",
    "Tree",
    "Witness",
    "datasets",
    "digest",
    "find",
    "from_bfloat16",
    "read",
    "replace_file",
    "to_bfloat16",
    "validate",
    "write",
]
