"""A bundle as a file: a header with the digest of all that follows, then HDF5."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import h5py
import numpy as np

from kdtree_engine.bundle._checks import validate
from kdtree_engine.bundle._data import (
    Bundle,
    Context,
    Drafter,
    Expected,
    Layer,
    Request,
    Tree,
    Witness,
    datasets,
    refuse,
    spec_of,
    specs_of,
    to_json,
)
from kdtree_engine.errors import BundleError

if TYPE_CHECKING:
    from kdtree_engine.bundle._data import Array, Spec

FORMAT = "kdtree-bundle"
FORMAT_VERSION = 1

# The text line before the HDF5 data. 512 is the smallest offset at which HDF5 looks for data behind a foreign header.
HEADER_BYTES = 512
# Ceilings on what a file may make the reader allocate; ten times the largest bundle that the repository could hold.
MAX_FILE_BYTES = 64 << 20
MAX_ARRAY_BYTES = 256 << 20

# Strings are of fixed length: HDF5 keeps those of variable length in a heap without checksums, and reading a heap that
# was forged may never end.
_ATTRIBUTE_KINDS = {str: "S", int: "i", float: "f"}
_GZIP, _SHUFFLE = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE


def find(root: str | os.PathLike[str]) -> list[Path]:
    """Every bundle under a folder, sorted by path."""
    return sorted(Path(root).rglob("*.h5"))


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the whole file, in hex."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def read(path: str | os.PathLike[str]) -> Bundle:
    """Read and validate a bundle; BundleError says what is wrong with the file and where."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        refuse("path", f"cannot read {path}: {error.strerror}; check the path")
    try:
        body = _strip_header(data)
        try:
            with h5py.File(io.BytesIO(body), "r") as file:
                bundle = from_hdf5(file)
        except BundleError:
            raise
        except Exception as error:  # HDF5 reports a damaged structure by many exception types
            reason = " ".join(str(error).split())[:200]
            refuse("file", f"its HDF5 data cannot be read ({reason}); get the file again")
        validate(bundle)
    except BundleError as error:
        problem = str(error).removeprefix(f"{error.argument}: ")
        raise BundleError(error.argument, f"{path.name}: {problem}") from None
    return bundle


def write(path: str | os.PathLike[str], bundle: Bundle) -> None:
    """Validate a bundle and write it; the same bundle always gives the same bytes with the same HDF5 library.

    The file appears whole or not at all: a full or read-only disk raises BundleError and leaves an old file as it was.
    """
    validate(bundle)
    body = to_hdf5(bundle)
    if HEADER_BYTES + len(body) > MAX_FILE_BYTES:
        refuse(
            "bundle",
            f"{bundle.name} takes {len(body)} bytes; a file may hold {MAX_FILE_BYTES}; store fewer layers or keys",
        )
    replace_file(path, header(body) + body)


def replace_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Put `data` at `path` whole: written beside it, flushed to the disk, then renamed over it."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        refuse("path", f"cannot write {path}: {error.strerror}; nothing was changed; free or choose another folder")


def array_digest(array: Array) -> str:
    """SHA-256 of an array's elements in row-major order, in hex."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def header(body: bytes) -> bytes:
    """The header that goes before these HDF5 data."""
    line = f"{FORMAT} {FORMAT_VERSION} sha256:{hashlib.sha256(body).hexdigest()}\n".encode()
    return line.ljust(HEADER_BYTES, b"\0")


def _strip_header(data: bytes) -> bytes:
    """The HDF5 data behind the header, once its digest is right: HDF5 never sees a damaged file."""
    if len(data) > MAX_FILE_BYTES:
        refuse("file", f"it is larger than {MAX_FILE_BYTES} bytes; a bundle is not; check the path")
    match = re.match(rb"kdtree-bundle ([0-9]{1,9}) ", data[:HEADER_BYTES])
    if match is None:
        refuse("file", "it does not begin with 'kdtree-bundle'; write bundles with kdtree_engine.bundle.write")
    _check_version(int(match[1]))
    body = data[HEADER_BYTES:]
    if data[:HEADER_BYTES] != header(body):
        refuse(
            "file",
            f"its SHA-256 is not the one in its header: truncated ({len(data)} bytes) or damaged; get the file again",
        )
    return body


def _check_version(version: int) -> None:
    if version > FORMAT_VERSION:
        refuse("format_version", f"it is {version}, newer than {FORMAT_VERSION}; update kdtree-engine to read it")
    if version != FORMAT_VERSION:
        refuse("format_version", f"it is {version}; expected {FORMAT_VERSION}")


def _attributes(bundle: Bundle) -> dict[str, Any]:
    """The root attributes, in the order of the file."""
    values: dict[str, Any] = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "name": bundle.name,
        "op": "verify_attn",
        "origin": bundle.origin,
        "model": bundle.model,
        "page_size": bundle.page_size,
        "num_slots": bundle.num_slots,
        "num_heads": bundle.num_heads,
        "d_latent": bundle.d_latent,
        "d_rope": bundle.d_rope,
        "sm_scale": bundle.sm_scale,
        "provenance": to_json(bundle.provenance),
    }
    if bundle.model_config is not None:
        values |= {"model_config": to_json(bundle.model_config), "model_seed": bundle.model_seed}
    return values


def to_hdf5(bundle: Bundle) -> bytes:
    """The HDF5 part of a bundle's file."""
    with h5py.File("bundle", "w", driver="core", backing_store=False, libver=("v110", "v110")) as file:
        for name, value in _attributes(bundle).items():
            _set_attribute(file, name, value)
        for path, array, spec in datasets(bundle):
            # One chunk a dataset: HDF5 allows no chunk of zero elements, and its own choice varies by version.
            packing = (
                {"chunks": array.shape, "compression": "gzip", "compression_opts": 4, "shuffle": True}
                if array.size
                else {}
            )
            dataset = file.create_dataset(path, data=array, track_times=False, **packing)
            _set_attribute(dataset, "axes", spec.axes)
            _set_attribute(dataset, "logical_dtype", spec.logical_dtype)
            _set_attribute(dataset, "sha256", array_digest(array))
        if bundle.expected is not None:
            for name in ("logit_budget", "logit_budget_bfloat16"):
                _set_attribute(file["expected"], name, getattr(bundle.expected, name))
        file.flush()
        image: bytes = file.id.get_file_image()
        return image


def _set_attribute(owner: Any, name: str, value: str | float) -> None:
    owner.attrs[name] = np.bytes_(value.encode("ascii")) if isinstance(value, str) else value


_Group = TypeVar("_Group")


class _Reader:
    """Fetches exactly the objects of the format from an open file, refusing whatever could cost more than it holds."""

    def __init__(self, file: h5py.File) -> None:
        self.file = file
        self.bytes_left = MAX_ARRAY_BYTES
        self.known: set[str] = set()

    def attribute(self, kind: type[Any], name: str, group: str = "/") -> Any:
        owner = self.file[group]
        label = name if group == "/" else f"{group}/{name}"
        if name not in owner.attrs:
            refuse(label, "the attribute is missing; get the file again")
        stored = owner.attrs.get_id(name)
        if stored.shape != () or stored.dtype.kind != _ATTRIBUTE_KINDS[kind]:
            refuse(label, f"got {stored.dtype} of shape {stored.shape}; expected one {kind.__name__}")
        value = owner.attrs[name].item()
        return value.decode("ascii") if kind is str else value

    def json(self, name: str) -> Any:
        text = self.attribute(str, name)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            refuse(name, "it is not JSON; expected an object")
        if not isinstance(value, dict):
            refuse(name, f"it is a {type(value).__name__}; expected an object")
        return value

    def children(self, group: str) -> list[str]:
        """Names in a group; nothing but hard links, so that no name leads out of the file."""
        if group not in self.file:
            return []
        owner = self.file[group]
        if not isinstance(owner, h5py.Group):
            refuse(group, "expected a group")
        for name in owner:
            if not isinstance(owner.get(name, getlink=True), h5py.HardLink):
                refuse(f"{group}/{name}".lstrip("/"), "it is a link to another place; expected the data itself")
        return list(owner)

    def array(self, path: str, spec: Spec) -> Array:
        self.known.add(path)
        group, _, name = path.rpartition("/")
        if name not in self.children(group):
            refuse(path, "the dataset is missing; get the file again")
        dataset = self.file[path]
        if not isinstance(dataset, h5py.Dataset):
            refuse(path, "expected a dataset")
        if dataset.dtype != spec.dtype:
            refuse(path, f"dtype is {dataset.dtype}; expected {spec.dtype} for {spec.logical_dtype}")
        if dataset.shape is None or dataset.ndim != len(spec.names):
            refuse(path, f"shape is {dataset.shape}; expected [{', '.join(spec.names)}]")
        plist = dataset.id.get_create_plist()
        filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
        whole = dataset.chunks is None if not filters else dataset.chunks == dataset.shape
        if filters not in ([], [_SHUFFLE, _GZIP]) or not whole or dataset.external or dataset.is_virtual:
            refuse(path, "it is stored otherwise; expected plain data, or one chunk with shuffle and gzip")
        self.bytes_left -= math.prod(dataset.shape) * spec.dtype.itemsize
        if self.bytes_left < 0:
            refuse(path, f"shape is {list(dataset.shape)}; the arrays of a bundle take at most {MAX_ARRAY_BYTES} bytes")
        for name, expected in (("axes", spec.axes), ("logical_dtype", spec.logical_dtype)):
            stored = self.attribute(str, name, path)
            if stored != expected:
                refuse(f"{path}/{name}", f"got {stored!r}; expected {expected!r}")
        array: Array = _inflate(path, dataset) if filters else dataset[()]
        if self.attribute(str, "sha256", path) != array_digest(array):
            refuse(path, "its SHA-256 differs from the stored one; get the file again")
        return array

    def group(self, owner: type[_Group], path: str, **extra: Any) -> _Group:
        present, values = self.children(path), dict(extra)
        for name, spec in specs_of(owner):
            optional = owner.__dataclass_fields__[name].default is None  # type: ignore[attr-defined]
            if name not in values and not (optional and name not in present):
                values[name] = self.array(f"{path}/{name}", spec)
        return owner(**values)

    def numbered(self, path: str) -> list[str]:
        """The children 0, 1, 2, ... of a group as paths."""
        names = self.children(path)
        if sorted(names) != sorted(str(index) for index in range(len(names))):
            refuse(path, f"it holds {', '.join(sorted(names)[:8])}; expected 0, 1, 2, ...")
        return [f"{path}/{index}" for index in range(len(names))]

    def check_nothing_else(self) -> None:
        groups = {path.rpartition("/")[0] for path in self.known}
        groups |= {group.split("/")[0] for group in groups}
        for group in ["", *sorted(groups)]:
            for name in self.children(group or "/"):
                path = f"{group}/{name}".lstrip("/")
                if path not in self.known and path not in groups:
                    refuse(path, "it is not part of the format; remove it or raise the format version")


def _inflate(path: str, dataset: h5py.Dataset) -> Array:
    """The dataset's only chunk, unpacked here: HDF5 would unpack as much as a forged chunk makes it."""
    mask, packed = dataset.id.read_direct_chunk((0,) * dataset.ndim)
    itemsize = dataset.dtype.itemsize
    size = dataset.size * itemsize
    data = zlib.decompressobj().decompress(packed, size + 1)
    if mask or len(data) != size:
        refuse(path, f"its chunk does not unpack to {size} bytes; get the file again")
    shuffled = np.frombuffer(data, np.uint8).reshape(itemsize, dataset.size)
    array: Array = np.ascontiguousarray(shuffled.T).view(dataset.dtype).reshape(dataset.shape)
    return array


def from_hdf5(file: h5py.File) -> Bundle:
    """The bundle in an open HDF5 file, not yet validated; BundleError where the file leaves the format."""
    reader = _Reader(file)
    if reader.attribute(str, "format") != FORMAT:
        refuse("format", f"got {reader.attribute(str, 'format')!r}; expected {FORMAT!r}")
    _check_version(reader.attribute(int, "format_version"))
    if reader.attribute(str, "op") != "verify_attn":
        refuse("op", f"got {reader.attribute(str, 'op')!r}; expected 'verify_attn'")
    top = reader.children("/")
    seeded = "model_config" in file.attrs
    attn_spec = spec_of(Witness, "attn")
    bundle = Bundle(
        name=reader.attribute(str, "name"),
        origin=reader.attribute(str, "origin"),
        model=reader.attribute(str, "model"),
        page_size=reader.attribute(int, "page_size"),
        num_slots=reader.attribute(int, "num_slots"),
        num_heads=reader.attribute(int, "num_heads"),
        d_latent=reader.attribute(int, "d_latent"),
        d_rope=reader.attribute(int, "d_rope"),
        sm_scale=reader.attribute(float, "sm_scale"),
        provenance=reader.json("provenance"),
        model_config=reader.json("model_config") if seeded else None,
        model_seed=reader.attribute(int, "model_seed") if seeded else None,
        request=reader.group(Request, "request"),
        context=reader.group(Context, "context"),
        tree=reader.group(Tree, "tree"),
        drafter=reader.group(Drafter, "drafter") if "drafter" in top else None,
        layers=tuple(reader.group(Layer, path) for path in reader.numbered("layers")),
        witness=reader.group(
            Witness, "witness", attn=tuple(reader.array(path, attn_spec) for path in reader.numbered("witness/attn"))
        )
        if "witness" in top
        else None,
        expected=reader.group(
            Expected,
            "expected",
            logit_budget=reader.attribute(float, "logit_budget", "expected"),
            logit_budget_bfloat16=reader.attribute(float, "logit_budget_bfloat16", "expected"),
        )
        if "expected" in top
        else None,
    )
    reader.check_nothing_else()
    return bundle
