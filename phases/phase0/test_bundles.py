"""Bundles: what is written is what is read, and everything else is refused with one line that names the place."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import itertools
import json
import os
import resource
import tempfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from kdtree_engine import bundle as bundles
from kdtree_engine.bundle import Bundle, _file, from_bfloat16, to_bfloat16
from kdtree_engine.errors import BundleError
from kdtree_engine.ops.verify_attn import OUT_ROW_REL_L2
from kdtree_engine.ops.verify_attn_paged import OUT_REL_L2
from kdtree_engine.show import show, summary
from phases import bundles as command
from phases import exactness, synthetic

if TYPE_CHECKING:
    from collections.abc import Callable

HEADER = _file.HEADER_BYTES


@functools.cache
def small_bundle() -> Bundle:
    """A small complete bundle: two requests, branches, a drafter."""
    return synthetic.testable(
        11,
        prefix_len=(0, 5),
        num_nodes=(4, 8),
        num_heads=2,
        shape="drafter",
        page_size=4,
        out_row_rel_l2=OUT_ROW_REL_L2,
        bfloat16_out_row_rel_l2=OUT_REL_L2,
    )


@functools.cache
def stored() -> bytes:
    """The bytes of its file."""
    with tempfile.TemporaryDirectory() as folder:
        bundles.write(Path(folder) / "b.h5", small_bundle())
        return (Path(folder) / "b.h5").read_bytes()


def assert_same(left: Bundle, right: Bundle) -> None:
    for (name, a, _), (other, b, _) in itertools.zip_longest(bundles.datasets(left), bundles.datasets(right)):
        assert name == other
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b, err_msg=name)
    for field in dataclasses.fields(Bundle):
        value = getattr(left, field.name)
        if isinstance(value, (str, int, float, dict)):
            assert value == getattr(right, field.name), field.name
    for name in ("logit_budget", "logit_budget_bfloat16"):
        assert getattr(left.expected, name, None) == getattr(right.expected, name, None)


def assert_refused(error: BundleError, argument: str) -> None:
    assert error.argument == argument
    assert "\n" not in str(error)
    assert str(error).startswith(f"{argument}: ")


def test_file_holds_what_was_written(tmp_path: Path) -> None:
    bundles.write(tmp_path / "b.h5", small_bundle())
    assert_same(bundles.read(tmp_path / "b.h5"), small_bundle())


def test_same_bundle_gives_same_bytes(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        bundles.write(tmp_path / name, small_bundle())
    bundles.write(tmp_path / "c.h5", bundles.read(tmp_path / "a.h5"))
    assert len({bundles.digest(path) for path in bundles.find(tmp_path)}) == 1


def test_file_opens_with_plain_hdf5(tmp_path: Path) -> None:
    (tmp_path / "b.h5").write_bytes(stored())
    with h5py.File(tmp_path / "b.h5", "r") as file:
        assert file.attrs["format"] == b"kdtree-bundle"
        assert file["layers/0/q"].attrs["logical_dtype"] == b"bfloat16"


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=3),
    page_size=st.sampled_from([1, 4]),
    geometry=st.sampled_from([(512, 64), (512, 0), (256, 32)]),
    heads=st.integers(1, 5),
    shape=st.sampled_from(synthetic.SHAPES),
    seed=st.integers(0, 10),
)
def test_any_shape_survives_the_round_trip(
    sizes: list[tuple[int, int]], page_size: int, geometry: tuple[int, int], heads: int, shape: str, seed: int
) -> None:
    prefix_len, num_nodes = zip(*sizes, strict=True)
    bundle = synthetic.synthetic(
        seed,
        prefix_len=prefix_len,
        num_nodes=num_nodes,
        num_heads=heads,
        d_latent=geometry[0],
        d_rope=geometry[1],
        num_layers=1,
        page_size=page_size,
        shape=shape,
    )
    bundles.validate(bundle)
    with h5py.File(io.BytesIO(_file.to_hdf5(bundle)), "r") as file:
        assert_same(_file.from_hdf5(file), bundle)


# Damage


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_flipped_byte_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    damaged = bytearray(stored())
    place = data.draw(st.integers(0, len(damaged) - 1) | st.integers(0, 100))
    damaged[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / "b.h5").write_bytes(damaged)
    with pytest.raises(BundleError) as error:
        bundles.read(tmp_path / "b.h5")
    assert error.value.argument in ("file", "format_version")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_truncation_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(stored()) - 1))
    (tmp_path / "b.h5").write_bytes(stored()[:length])
    with pytest.raises(BundleError) as error:
        bundles.read(tmp_path / "b.h5")
    assert_refused(error.value, "file")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damage_behind_a_forged_digest_never_escapes_as_another_error(tmp_path: Path, data: st.DataObject) -> None:
    body = bytearray(stored()[HEADER:])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "b.h5").write_bytes(_file.header(bytes(body)) + body)
    with contextlib.suppress(BundleError):  # a byte that nobody reads may change; nothing else may be raised
        bundles.read(tmp_path / "b.h5")


def test_a_newer_format_is_refused_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "b.h5").write_bytes(stored().replace(b"kdtree-bundle 1 ", b"kdtree-bundle 2 ", 1))
    with pytest.raises(BundleError, match="newer than 1; update kdtree-engine") as error:
        bundles.read(tmp_path / "b.h5")
    assert_refused(error.value, "format_version")


@pytest.mark.parametrize("content", [b"", b"no bundle", b"\x89HDF\r\n\x1a\n" + bytes(600)])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.h5").write_bytes(content)
    with pytest.raises(BundleError, match=r"b\.h5: it does not begin with 'kdtree-bundle'"):
        bundles.read(tmp_path / "b.h5")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="No such file") as error:
        bundles.read(tmp_path / "none.h5")
    assert_refused(error.value, "path")


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "b.h5").open("wb") as file:
        file.truncate(_file.MAX_FILE_BYTES + 1)
    with pytest.raises(BundleError, match="larger than"):
        bundles.read(tmp_path / "b.h5")


# Forgery: a valid digest around HDF5 that does not follow the format


def forge(tmp_path: Path, change: Callable[[h5py.File], object]) -> BundleError:
    """Apply a change to the HDF5 part, sign it anew, and give the refusal."""
    with h5py.File("forged", "w", driver="core", backing_store=False, libver=("v110", "v110")) as target:
        with h5py.File(io.BytesIO(stored()[HEADER:]), "r") as source:
            for name, value in source.attrs.items():
                target.attrs[name] = value
            for name in source:
                source.copy(name, target)
        change(target)
        target.flush()
        body = target.id.get_file_image()
    path = tmp_path / "forged.h5"
    path.write_bytes(_file.header(body) + body)
    with pytest.raises(BundleError) as error:
        bundles.read(path)
    assert "forged.h5: " in str(error.value)
    assert "\n" not in str(error.value)
    return error.value


def attribute(path: str, name: str, value: Any) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        file[path].attrs[name] = value

    return change


def replace(path: str, **arguments: Any) -> Callable[[h5py.File], object]:
    """Put another dataset in the place of one, with its attributes and, if it has data, their digest."""

    def change(file: h5py.File) -> None:
        kept = dict(file[path].attrs)
        del file[path]
        dataset = file.create_dataset(path, **arguments)
        dataset.attrs.update(kept)
        if "data" in arguments:
            digest = _file.array_digest(np.asarray(arguments["data"]))
            dataset.attrs["sha256"] = np.bytes_(digest.encode())

    return change


def remove(path: str) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        del file[path]

    return change


def link(path: str, target: Any) -> Callable[[h5py.File], object]:
    def change(file: h5py.File) -> None:
        del file[path]
        file[path] = target

    return change


def oversized_chunk(file: h5py.File) -> None:
    """A chunk that unpacks to far more than the dataset holds."""
    replace("tree/tokens", shape=(12,), dtype="<i4", chunks=(12,), compression="gzip", shuffle=True)(file)
    file["tree/tokens"].id.write_direct_chunk((0,), zlib.compress(bytes(100 << 20)))


FORGERIES: dict[str, tuple[str, Callable[[h5py.File], object]]] = {
    "other format": ("format", attribute("/", "format", np.bytes_(b"zip"))),
    "newer version inside": ("format_version", attribute("/", "format_version", 2)),
    "other op": ("op", attribute("/", "op", np.bytes_(b"tree_build"))),
    "attribute of another type": ("page_size", attribute("/", "page_size", 4.0)),
    "attribute that is an array": ("sm_scale", attribute("/", "sm_scale", [0.1, 0.2])),
    "variable-length string": ("name", attribute("/", "name", "text")),
    "bad name": ("name", attribute("/", "name", np.bytes_(b"../../x"))),
    "scale that is not finite": ("sm_scale", attribute("/", "sm_scale", np.nan)),
    "negative scale": ("sm_scale", attribute("/", "sm_scale", -1.0)),
    "too many heads": ("num_heads", attribute("/", "num_heads", 129)),
    "other head count": ("layers/0/q", attribute("/", "num_heads", 3)),
    "partial page": ("num_slots", attribute("/", "num_slots", 33)),
    "unknown model": ("model", attribute("/", "model", np.bytes_(b"other"))),
    "provenance that is no JSON": ("provenance", attribute("/", "provenance", np.bytes_(b"{"))),
    "provenance that is deep": ("provenance", attribute("/", "provenance", np.bytes_(b"[" * 16000))),
    "provenance that is a list": ("provenance", attribute("/", "provenance", np.bytes_(b"[]"))),
    "missing dataset": ("tree/parents", remove("tree/parents")),
    "missing group": ("request/prefix_len", remove("request")),
    "missing layer 0": ("layers", remove("layers/0")),
    "missing budget": ("expected/logit_budget", lambda file: file["expected"].attrs.__delitem__("logit_budget")),
    "missing digest": ("tree/tokens/sha256", lambda file: file["tree/tokens"].attrs.__delitem__("sha256")),
    "wrong digest": ("tree/tokens", attribute("tree/tokens", "sha256", np.bytes_(b"0" * 64))),
    "other axes": ("tree/tokens/axes", attribute("tree/tokens", "axes", np.bytes_(b"pairs"))),
    "group for a dataset": (
        "tree/tokens",
        lambda file: (file.__delitem__("tree/tokens"), file.create_group("tree/tokens")),
    ),
    "other dtype": ("tree/tokens", replace("tree/tokens", data=np.zeros(12, "<i8"))),
    "big-endian": ("tree/tokens", replace("tree/tokens", data=np.zeros(12, ">i4"))),
    "other shape": ("tree/tokens", replace("tree/tokens", data=np.zeros(11, "<i4"))),
    "other rank": ("tree/tokens", replace("tree/tokens", data=np.zeros((12, 1), "<i4"))),
    "no shape": ("tree/tokens", replace("tree/tokens", data=h5py.Empty("<i4"), dtype="<i4")),
    "astronomic shape": ("tree/tokens", replace("tree/tokens", shape=(1 << 40,), dtype="<i4")),
    "astronomic chunked shape": (
        "tree/tokens",
        replace("tree/tokens", shape=(1 << 40,), dtype="<i4", chunks=(1 << 20,), compression="gzip", shuffle=True),
    ),
    "oversized chunk": ("tree/tokens", oversized_chunk),
    "other filter": ("tree/tokens", replace("tree/tokens", data=np.zeros(12, "<i4"), chunks=(12,), compression="lzf")),
    "variable-length data": ("tree/tokens", replace("tree/tokens", shape=(12,), dtype=h5py.vlen_dtype(np.int32))),
    "external storage": ("tree/tokens", replace("tree/tokens", shape=(12,), dtype="<i4", external=[("secret", 0, 48)])),
    "external link": ("tree/tokens", link("tree/tokens", h5py.ExternalLink("other.h5", "/x"))),
    "soft link": ("tree/tokens", link("tree/tokens", h5py.SoftLink("/tree/tokens"))),
    "linked group": ("tree", link("tree", h5py.ExternalLink("other.h5", "/tree"))),
    "unknown dataset": ("tree/extra", lambda file: file.create_dataset("tree/extra", data=1)),
    "unknown group": ("extra", lambda file: file.create_group("extra")),
    "group in itself": ("tree/tree", lambda file: file["tree"].__setitem__("tree", file["tree"])),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_is_refused(tmp_path: Path, name: str) -> None:
    argument, change = FORGERIES[name]
    error = forge(tmp_path, change)
    assert error.argument == argument


# Meaning: what validation demands of the numbers


def altered(group: str, name: str, index: Any, value: Any) -> Callable[[Bundle], Bundle]:
    def change(bundle: Bundle) -> Bundle:
        owner = bundle.layers[0] if group == "layers" else getattr(bundle, group)
        array = getattr(owner, name).copy()
        array[index] = value
        new: Any = dataclasses.replace(owner, **{name: array})
        if group == "layers":
            return dataclasses.replace(bundle, layers=(new, *bundle.layers[1:]))
        named: dict[str, Any] = {group: new}
        return dataclasses.replace(bundle, **named)

    return change


def changed(group: str, **values: Any) -> Callable[[Bundle], Bundle]:
    def change(bundle: Bundle) -> Bundle:
        named: dict[str, Any] = {group: dataclasses.replace(getattr(bundle, group), **values)}
        return dataclasses.replace(bundle, **named)

    return change


# Nodes 0..3 are request 0, nodes 4..11 request 1; node 5's parent is request 1's root.
MEANINGLESS: dict[str, tuple[str, str, Callable[[Bundle], Bundle]]] = {
    "negative prefix": ("request/prefix_len", "0 or more", altered("request", "prefix_len", 1, -1)),
    "no nodes": ("request/num_nodes", "1..256", altered("request", "num_nodes", 0, 0)),
    "too many nodes": ("request/num_nodes", "1..256", altered("request", "num_nodes", 0, 257)),
    "too many keys": ("request/prefix_len", "262144", altered("request", "prefix_len", 0, 2**31 - 1)),
    "indptr that is not the sum": ("request/kv_indptr", "expected [0, 4, 17]", altered("request", "kv_indptr", 1, 3)),
    "slot outside": ("request/kv_indices", "key 2 has slot", altered("request", "kv_indices", 2, 1 << 40)),
    "negative slot": ("request/kv_indices", "key 2 has slot -1", altered("request", "kv_indices", 2, -1)),
    "slot used twice": (
        "request/kv_indices",
        "share slot",
        lambda b: altered("request", "kv_indices", 2, b.request.kv_indices[7])(b),
    ),
    "root with a parent": ("tree/parents", "node 0 has parent 0", altered("tree", "parents", 4, 0)),
    "parent outside": ("tree/parents", "node 2 has parent 99", altered("tree", "parents", 6, 99)),
    "second root": ("tree/parents", "node 2 has parent -1", altered("tree", "parents", 6, -1)),
    "own parent": ("tree/parents", "in a cycle", altered("tree", "parents", 6, 2)),
    "cycle of two": ("tree/parents", "in a cycle", altered("tree", "parents", [5, 6], [2, 1])),
    "parent after its child": ("tree/parents", "comes after it", altered("tree", "parents", [5, 6], [2, 0])),
    "wrong depth": ("tree/depths", "expected 1", altered("tree", "depths", 5, 2)),
    "negative token": ("tree/tokens", "negative", altered("tree", "tokens", 5, -7)),
    "blind to itself": ("tree/visibility", "expected 1", altered("tree", "visibility", 16 + 9, 0)),
    "sees its child": ("tree/visibility", "expected 0", altered("tree", "visibility", 16 + 1, 1)),
    "visibility 2": ("tree/visibility", "expected 1", altered("tree", "visibility", 0, 2)),
    "rising marginals": ("drafter/log_probs", "descending", altered("drafter", "log_probs", (0, 0, 0), -99.0)),
    "NaN marginal": ("drafter/log_probs", "not finite", altered("drafter", "log_probs", (0, 0, 0), np.nan)),
    "infinite query": ("layers/0/q", "not finite", altered("layers", "q", (0, 0, 0), 0x7F80)),
    "NaN row": ("layers/0/kv", "not finite", altered("layers", "kv", (3, 9), 0x7FC1)),
    "NaN output": ("layers/0/out", "not finite", altered("layers", "out", (0, 0, 0), np.nan)),
    "no path": ("expected/accepted_len", "1..4", altered("expected", "accepted_len", 0, 0)),
    "path longer than its tree": ("expected/accepted_len", "1..4", altered("expected", "accepted_len", 0, 5)),
    "path off the root": ("expected/accepted_path", "starts at the root", altered("expected", "accepted_path", 0, 1)),
    "token outside": ("expected/argmax", "0..63", altered("expected", "argmax", 0, 64)),
    "negative margin": ("expected/margin", "negative", altered("expected", "margin", 0, -0.5)),
    "other slots committed": (
        "expected/committed_slots",
        "first node slots",
        altered("expected", "committed_slots", 0, 31),
    ),
    "no requests": ("request/prefix_len", "at least one", changed("request", prefix_len=np.zeros(0, np.int32))),
    "list for an array": ("tree/parents", "got list", changed("tree", parents=[-1])),
    "no layers": ("layers", "there is none", lambda b: dataclasses.replace(b, layers=())),
    "expected without out": (
        "layers/0/out",
        "go together",
        lambda b: dataclasses.replace(
            b, layers=tuple(dataclasses.replace(layer, out=None, lse=None) for layer in b.layers)
        ),
    ),
    "zero budget": ("expected/logit_budget", "positive", changed("expected", logit_budget=0.0)),
    "seed without config": ("model_config", "seeded", lambda b: dataclasses.replace(b, model_config=None)),
    "provenance with NaN": ("provenance", "JSON", lambda b: dataclasses.replace(b, provenance={"x": float("nan")})),
    "provenance too long": ("provenance", "at most", lambda b: dataclasses.replace(b, provenance={"x": "y" * 20000})),
}


@pytest.mark.parametrize("name", MEANINGLESS)
def test_meaningless_bundle_is_neither_valid_nor_written(tmp_path: Path, name: str) -> None:
    argument, says, change = MEANINGLESS[name]
    bad = change(small_bundle())
    attempts = (functools.partial(bundles.validate, bad), functools.partial(bundles.write, tmp_path / "b.h5", bad))
    for attempt in attempts:
        with pytest.raises(BundleError) as error:
            attempt()
        assert_refused(error.value, argument)
        assert says in str(error.value)
    assert not list(tmp_path.iterdir())


# Writing


@pytest.fixture
def old_file(tmp_path: Path) -> Path:
    path = tmp_path / "b.h5"
    path.write_bytes(b"the old file")
    return path


def assert_old_file_survives(path: Path) -> None:
    with pytest.raises(BundleError, match="nothing was changed") as error:
        bundles.write(path, small_bundle())
    assert_refused(error.value, "path")
    assert path.read_bytes() == b"the old file"
    assert list(path.parent.iterdir()) == [path]


def test_full_disk_leaves_the_old_file(old_file: Path) -> None:
    """The system stops the write after 4 KiB, as a full disk would."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        assert_old_file_survives(old_file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_that_fails_late_leaves_the_old_file(old_file: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, fail)
    assert_old_file_survives(old_file)


def test_read_only_folder_leaves_the_old_file(old_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by the open call, since permissions do not stop a test that runs as root."""
    real = io.open

    def read_only(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if "x" in mode or "w" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))
        return real(file, mode, *arguments, **named)

    monkeypatch.setattr(io, "open", read_only)
    assert_old_file_survives(old_file)


def test_missing_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="No such file") as error:
        bundles.write(tmp_path / "none" / "b.h5", small_bundle())
    assert_refused(error.value, "path")


# Views


def test_dense_inputs_hold_every_request_and_poison_the_rest() -> None:
    bundle = small_bundle()
    dense = bundle.dense(1)
    assert dense["q"].shape == (2, 8, 2, 576)
    assert dense["kv"].shape == (2, 13, 576)
    assert dense["mask"].shape == (2, 8, 13)
    assert dense["kv_len"].tolist() == [4, 13]
    np.testing.assert_array_equal(bundle.unpad_nodes(dense["q"]), from_bfloat16(bundle.layers[1].q))
    np.testing.assert_array_equal(dense["kv"][1], from_bfloat16(bundle.layers[1].kv[4:]))
    assert np.isnan(dense["kv"][0, 4:]).all()
    assert (bundle.dense(1, poison=1e30)["kv"][0, 4:] == np.float32(1e30)).all()
    np.testing.assert_array_equal(dense["mask"][1, :, :5], 1)
    np.testing.assert_array_equal(dense["mask"][1, :, 5:], bundle.visibility(1))
    np.testing.assert_array_equal(dense["mask"][0, :4, :4], bundle.visibility(0))
    assert not dense["mask"][0, 4:].any()
    assert not dense["mask"][0, :, 4:].any()


def test_pool_holds_every_key_in_its_slot_and_poison_elsewhere() -> None:
    bundle = small_bundle()
    pool = bundle.pool(0)
    np.testing.assert_array_equal(pool[bundle.request.kv_indices], bundle.layers[0].kv)
    unused = np.setdiff1d(np.arange(bundle.num_slots), bundle.request.kv_indices)
    assert unused.size
    assert np.isnan(from_bfloat16(pool[unused])).all()


def test_a_layer_that_is_not_there_is_refused() -> None:
    for view in (small_bundle().dense, small_bundle().pool):
        with pytest.raises(BundleError, match=r"expected 0\.\.1") as error:
            view(2)
        assert_refused(error.value, "layer")


@given(st.floats(width=32))
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    rounded = from_bfloat16(to_bfloat16(np.array([value], np.float32)))[0]
    if np.isnan(value):
        assert np.isnan(rounded)
        return
    bits = int(np.float32(value).view(np.uint32))
    below, above = (np.uint32(b << 16).view(np.float32) for b in (bits >> 16, (bits >> 16) + 1))
    exact = np.float64(value)
    with np.errstate(all="ignore"):
        down, up = abs(exact - np.float64(below)), abs(np.float64(above) - exact)
    if np.isfinite(above) and down != up:
        assert rounded == (below if down < up else above)
    elif np.isfinite(above):
        assert int(rounded.view(np.uint32)) >> 16 & 1 == 0


# The bundle command


@pytest.fixture
def capture(tmp_path: Path) -> Path:
    """The file of a fresh capture: no expected outputs."""
    bundle = small_bundle()
    layers = tuple(dataclasses.replace(layer, out=None, lse=None) for layer in bundle.layers)
    path = tmp_path / "capture.h5"
    bundles.write(path, dataclasses.replace(bundle, layers=layers, expected=None))
    return path


def test_add_completes_and_places_a_capture(capture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "placed"
    assert command.main(["add", str(capture), "--root", str(root)]) == 0
    placed = root / f"{small_bundle().name}.h5"
    assert placed.name in capsys.readouterr().out
    assert_same(bundles.read(placed), small_bundle())
    assert command.check(placed) == []
    assert command.main(["add", str(capture), "--root", str(root)]) == 1
    assert "--replace" in capsys.readouterr().err
    assert command.main(["add", str(capture), "--root", str(root), "--replace"]) == 0


def test_add_refuses_what_cannot_be_tested_with_every_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = synthetic.synthetic(1, num_nodes=(1,), num_heads=1)
    bundles.write(tmp_path / "b.h5", dataclasses.replace(bundle, provenance={"made": "/home/someone/x.py"}))
    assert command.main(["add", str(tmp_path / "b.h5"), "--root", str(tmp_path / "placed")]) == 1
    message = capsys.readouterr().err
    for reason in ("no node is rejected", "no node but the roots", "provenance lacks 'generator'", "path of a machine"):
        assert reason in message
    assert message.count("\n") == 1
    assert not (tmp_path / "placed").exists()


def test_add_refuses_a_tree_that_its_drafter_does_not_give(capture: Path, tmp_path: Path) -> None:
    bundle = bundles.read(capture)
    assert bundle.drafter is not None
    drafter = dataclasses.replace(bundle.drafter, budget=bundle.drafter.budget - 1)
    bundles.write(capture, dataclasses.replace(bundle, drafter=drafter))
    with pytest.raises(BundleError, match="request 1: tree/tokens differ from the tree of its drafter"):
        command.add(capture, root=tmp_path / "placed")


def test_a_bundle_without_weights_is_placed_apart(
    capture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is, without expected outputs: there is no round to expect."""
    monkeypatch.setattr(command, "WEIGHTLESS", tmp_path / "weightless")
    weightless = dataclasses.replace(
        bundles.read(capture), model="none", model_config=None, model_seed=None, expected=None, witness=None
    )
    bundles.write(capture, weightless)
    assert command.main(["add", str(capture), "--name", "another"]) == 0
    placed = tmp_path / "weightless" / "another.h5"
    assert_same(bundles.read(placed), dataclasses.replace(weightless, name="another"))
    with pytest.raises(BundleError, match="name: 'An other' is not a bundle name"):
        command.add(capture, name="An other")
    assert command.check(placed) == []


def test_check_finds_wrong_expectations(tmp_path: Path) -> None:
    bundle = small_bundle()
    assert bundle.expected is not None
    wrong = {
        "layers/0/out": altered("layers", "out", (0, 0, 0), 9.0)(bundle),
        "expected/logits": altered("expected", "logits", (0, 0), 9.0)(bundle),
        "expected/second": altered("expected", "second", 0, 0)(bundle),
        "expected/margin": altered("expected", "margin", 0, 9.0)(bundle),
        "expected/logit_budget": dataclasses.replace(
            bundle, expected=dataclasses.replace(bundle.expected, logit_budget=1e-9)
        ),
    }
    for place, changed in wrong.items():
        path = tmp_path / f"{bundle.name}.h5"
        bundles.write(path, changed)
        assert any(place in reason for reason in command.check(path)), place


def test_check_prints_json_and_fails_on_an_empty_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.h5").write_bytes(b"no bundle")
    assert command.main(["check", "--root", str(tmp_path), "--json"]) == 1
    assert "does not begin" in json.loads(capsys.readouterr().out)["bundles"]["bad.h5"][0]
    (tmp_path / "bad.h5").unlink()
    assert command.main(["check", "--root", str(tmp_path)]) == 1


def test_show_draws_trees_margins_and_the_accepted_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundles.write(tmp_path / "b.h5", small_bundle())
    assert command.main(["show", str(tmp_path / "b.h5")]) == 0
    text = capsys.readouterr().out
    for part in ("layers/1/kv", "keys width", "bfloat16", "request 1: prefix 5, 8 nodes", "margin", "* 0: token"):
        assert part in text
    assert command.main(["show", str(tmp_path / "b.h5"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["requests"][1]["accepted_path"][0] == 0
    assert facts["expected"]["float32"]["undecided"] == 0


def test_show_works_on_a_capture(capture: Path) -> None:
    bundle = bundles.read(capture)
    console = Console(file=io.StringIO(), width=200)
    show(bundle, console)
    assert summary(bundle)["expected"] is None


@pytest.mark.parametrize("arguments", [[], ["frobnicate"], ["add"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command.main(arguments)
    assert error.value.code == 2
    assert "usage" in capsys.readouterr().err


# The committed bundles


def test_committed_bundle_equals_the_oracle(bundle_path: Path) -> None:
    assert command.check(bundle_path) == []


def test_fixtures_stay_small() -> None:
    assert command.fixture_bytes() <= command.MAX_FIXTURE_BYTES


def test_readme_names_every_dataset_and_attribute() -> None:
    text = (exactness.FIXTURES / "README.md").read_text()
    for path, _, spec in bundles.datasets(small_bundle()):
        name = path.replace("layers/0", "layers/<l>").replace("layers/1", "layers/<l>")
        assert f"`{name}`" in text
        assert spec.logical_dtype in text
    with h5py.File(io.BytesIO(stored()[HEADER:]), "r") as file:
        for name in file.attrs:
            assert f"`{name}`" in text
