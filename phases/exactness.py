"""The levels of exactness of one kernel on one bundle, and the controls that must break them.

T0 numeric: every (node, head) row of the attention output, and its lse, is near the oracle's on the stored inputs.
T1 node tokens: with the kernel as the attention of every layer, no node's logits move by more than the budget D that
   the bundle declares. A node is decided if its margin (best minus second logit of the oracle) exceeds 2 D: then T1
   implies its token. An undecided node counts neither way and is always printed.
T2 round: accepted path, accepted tokens, bonus token and committed slots are equal.

"Token-exact" means T0, T1 and T2, no undecided node, errors that leave every node's token alone even if they were four
times as large, and a bundle whose walk leaves the root and rejects a node. Bounds are arguments: they belong to the
op's contract.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kdtree_engine.bundle import Bundle, Expected, from_bfloat16, to_bfloat16
from kdtree_engine.compare import Comparison, compare
from kdtree_engine.decode import read_weights
from kdtree_engine.errors import BundleError, DecodeError
from oracle import mla_model
from oracle.tree_accept import compact, tree_accept
from oracle.verify_attn import verify_attn
from phases.seeded_weights import seeded_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt

    Array = npt.NDArray[Any]
    # (layer, q [T, H, d], kv [K, d]) -> out [T, H, d_latent], lse [T, H]; both inputs float32, ragged as in the bundle.
    Attend: TypeAlias = Callable[[int, Array, Array], tuple[Array, Array]]

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

MARGIN_RATIO = 4.0
BUDGET_DRAWS = 16
BUDGET_SAFETY = 2.0


def round_to_bfloat16(x: Array) -> Array:
    """Values as a bfloat16 kernel input holds them, in float32."""
    return from_bfloat16(to_bfloat16(x.astype(np.float32)))


_ROUND_INPUTS: dict[str, Callable[[Array], Array]] = {
    "float32": lambda x: x.astype(np.float32),
    "bfloat16": round_to_bfloat16,
}


class DenseVerifyAttn(Protocol):
    """The dense op, as kdtree_engine.verify_attn and the oracle have it, or another behind its interface."""

    def __call__(self, q: Array, kv: Array, *, sm_scale: float, mask: Array, kv_len: Array) -> tuple[Array, Array]: ...


@dataclass(frozen=True, eq=False)
class Model:
    """The model behind a bundle: its config.json dict and its weights in float64."""

    config: Mapping[str, Any]
    weights: Mapping[str, Array]


@dataclass(frozen=True)
class Verdict:
    """What one kernel reached on one bundle; every figure is always there."""

    bundle: str
    kernel: str
    place: str
    dtype: str
    level: str  # the highest level passed with all below it: "none", "T0", "T1" or "T2"
    token_exact: bool
    nodes: int
    decided: int
    undecided: int
    budget: float  # D
    max_logit_error: float  # max d_i
    min_margin: float  # min m_i
    margin_ratio: float  # min m_i / (2 max d_i): the smallest margin against the largest error, of whatever nodes
    node_margin_ratio: float  # min (m_i / 2 d_i): how much larger the errors could be before a token could change
    out_row_rel_l2: float  # the worst row of all layers
    out_max_abs: float
    lse_error: float
    failures: tuple[str, ...]

    def as_line(self) -> str:
        """One line for people."""
        word = "token-exact" if self.token_exact else f"passes {self.level}"
        failures = "".join(f"; {failure}" for failure in self.failures)
        return (
            f"{self.bundle} x {self.kernel} [{self.place} {self.dtype}]: {word}, nodes {self.nodes} "
            f"(decided {self.decided}, undecided {self.undecided}), D {self.budget:.3g}, "
            f"max d {self.max_logit_error:.3g}, min m {self.min_margin:.3g}, margin ratio {self.margin_ratio:.3g}, "
            f"node margin ratio {self.node_margin_ratio:.3g}, "
            f"row relL2 {self.out_row_rel_l2:.3g}, max abs {self.out_max_abs:.3g}, "
            f"lse error {self.lse_error:.3g}{failures}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite figure becomes null."""
        values = dataclasses.asdict(self) | {"failures": list(self.failures)}
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


@dataclass(frozen=True)
class Control:
    """A wrong answer given on purpose, and which levels noticed it."""

    bundle: str
    name: str
    applicable: bool  # False where it cannot change the answer: no sibling to swap, no prefix to shorten
    detected: bool  # T0 failed, as it must
    t1_noticed: bool
    t2_noticed: bool
    out_row_rel_l2: float

    def as_line(self) -> str:
        """One line for people."""
        if not self.applicable:
            return f"{self.bundle} / {self.name}: not applicable"
        seen = ", ".join(
            f"{level} {'noticed' if noticed else 'blind'}"
            for level, noticed in (("T1", self.t1_noticed), ("T2", self.t2_noticed))
        )
        word = "detected" if self.detected else "NOT DETECTED"
        return f"{self.bundle} / {self.name}: {word} (row relL2 {self.out_row_rel_l2:.3g}), {seen}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: an infinite figure becomes null."""
        values = dataclasses.asdict(self)
        if not math.isfinite(self.out_row_rel_l2):
            values["out_row_rel_l2"] = None
        return values


def load_model(bundle: Bundle, fixtures: Path = FIXTURES) -> Model:
    """The weights and config that a bundle names; BundleError if there are none or the bundle is not of that model."""
    if bundle.model == "none":
        raise BundleError("model", f"{bundle.name} comes without weights; only T0 can be checked on it")
    if bundle.model == "seeded":
        model = _seeded(json.dumps(bundle.model_config, sort_keys=True), bundle.model_seed or 0)
    else:
        model = _stored(fixtures / bundle.model)
    expected = {
        "layers": (bundle.num_layers, "num_hidden_layers"),
        "num_heads": (bundle.num_heads, "num_attention_heads"),
        "d_latent": (bundle.d_latent, "kv_lora_rank"),
        "d_rope": (bundle.d_rope, "qk_rope_head_dim"),
    }
    for name, (value, key) in expected.items():
        if value != model.config[key]:
            raise BundleError(name, f"{bundle.name} has {value}; its model has {key} = {model.config[key]}")
    return model


@cache
def _seeded(config_json: str, seed: int) -> Model:
    config = json.loads(config_json)
    return Model(config, as_float64(seeded_weights(config, seed)))


@cache
def _stored(folder: Path) -> Model:
    try:
        weights, config = read_weights(folder, "target.safetensors", "config.json")
    except DecodeError as error:
        reason = str(error).removeprefix("model: ").partition(";")[0]
        raise BundleError("model", f"{reason}; restore fixtures/{folder.name}") from None
    return Model(config, as_float64(weights))


def as_float64(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Weights as the oracle takes them."""
    return {name: np.asarray(values, np.float64) for name, values in weights.items()}


def dense_attend(bundle: Bundle, call: DenseVerifyAttn) -> Attend:
    """The dense op as an attention over the bundle's ragged arrays; padded keys are NaN."""
    mask = bundle.mask()
    kv_len = (bundle.request.prefix_len + bundle.request.num_nodes).astype(np.int32)

    def attend(_layer: int, q: Array, kv: Array) -> tuple[Array, Array]:
        out, lse = call(
            bundle.pad_nodes(q), bundle.pad_keys(kv, math.nan), sm_scale=bundle.sm_scale, mask=mask, kv_len=kv_len
        )
        return bundle.unpad_nodes(out), bundle.unpad_nodes(lse)

    return attend


def oracle_attend(bundle: Bundle) -> Attend:
    """The oracle as an attention over the bundle's ragged arrays."""

    def call(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
        return verify_attn(q, kv, d_latent=bundle.d_latent, **arguments)

    return dense_attend(bundle, call)


def forward(bundle: Bundle, model: Model, attend: Attend, dtype: str = "float32") -> Array:
    """Logits [T, V], float64, with `attend` as the attention of every layer.

    `dtype` is the kernel's input type: what the layers above 0 compute for it is rounded to that first.
    """
    return mla_model.verify_forward(
        model.weights, model.config, _inputs(bundle), lambda layer, q, kv: attend(layer, q, kv)[0], _ROUND_INPUTS[dtype]
    )


def _inputs(bundle: Bundle) -> mla_model.Inputs:
    return mla_model.Inputs(
        tokens=bundle.tree.tokens,
        depths=bundle.tree.depths,
        prefix_len=bundle.request.prefix_len,
        num_nodes=bundle.request.num_nodes,
        q=from_bfloat16(bundle.layers[0].q),
        kv=[from_bfloat16(layer.kv) for layer in bundle.layers],
    )


def logit_budget(bundle: Bundle, model: Model, out_row_rel_l2: float, dtype: str = "float32") -> float:
    """D: twice the largest change of a logit when every row of every layer's attention output is off by the bound.

    The directions are random but seeded, so that the number is a property of the bundle.
    """
    exact = oracle_attend(bundle)
    reference = forward(bundle, model, exact, dtype)
    rng = np.random.default_rng(0)

    def perturbed(layer: int, q: Array, kv: Array) -> tuple[Array, Array]:
        out, lse = exact(layer, q, kv)
        direction = rng.standard_normal(out.shape)
        length = np.linalg.norm(out, axis=-1, keepdims=True) / np.linalg.norm(direction, axis=-1, keepdims=True)
        return out + out_row_rel_l2 * length * direction, lse

    moved = [forward(bundle, model, perturbed, dtype) - reference for _ in range(BUDGET_DRAWS)]
    return BUDGET_SAFETY * float(np.abs(moved).max())


def complete(bundle: Bundle, model: Model, *, out_row_rel_l2: float, bfloat16_out_row_rel_l2: float) -> Bundle:
    """The bundle with the oracle's answers in place of whatever it held: out and lse per layer, and `expected`."""
    logits = forward(bundle, model, oracle_attend(bundle))
    best, second, margin = top_two(logits)
    rounds = [tree_accept(*_walk_inputs(bundle, b, best)) for b in range(bundle.batch)]
    expected = Expected(
        argmax=best.astype(np.int32),
        second=second.astype(np.int32),
        margin=margin.astype(np.float32),
        logits=logits.astype(np.float32),
        accepted_path=np.concatenate([r.path for r in rounds]).astype(np.int32),
        accepted_len=np.array([len(r.path) for r in rounds], np.int32),
        bonus=np.array([r.bonus for r in rounds], np.int32),
        committed_slots=np.concatenate([_committed(bundle, b, r.path) for b, r in enumerate(rounds)]).astype(np.int64),
        logit_budget=logit_budget(bundle, model, out_row_rel_l2),
        logit_budget_bfloat16=logit_budget(bundle, model, bfloat16_out_row_rel_l2, "bfloat16"),
    )
    return dataclasses.replace(with_outputs(bundle), expected=expected)


def with_outputs(bundle: Bundle) -> Bundle:
    """The bundle with the oracle's out and lse of every layer."""
    attend = oracle_attend(bundle)
    layers = []
    for index, layer in enumerate(bundle.layers):
        out, lse = attend(index, from_bfloat16(layer.q), from_bfloat16(layer.kv))
        layers.append(dataclasses.replace(layer, out=out.astype(np.float32), lse=lse.astype(np.float32)))
    return dataclasses.replace(bundle, layers=tuple(layers))


def shortcomings(bundle: Bundle) -> list[str]:
    """Why a complete bundle is not token-exact-testable; empty if it is.

    The margin ratio is taken against D, which is at least twice what an accepted kernel's logits may move, so that a
    kernel within T0 cannot fall below it.
    """
    expected = _expected(bundle)
    reasons = []
    floor = expected.margin.min() / (2 * expected.logit_budget)
    undecided = np.flatnonzero(expected.margin <= 2 * expected.logit_budget)
    if undecided.size:
        reasons.append(f"{undecided.size} undecided nodes in float32 (the first is {undecided[0]})")
    elif floor <= MARGIN_RATIO:
        reasons.append(f"margin ratio {floor:.3g} at the budget D; more than {MARGIN_RATIO:g} is needed")
    walked = np.concatenate([bundle.nodes(b).start + path for b, path in enumerate(_paths(bundle))])
    close = walked[expected.margin[walked] <= 2 * expected.logit_budget_bfloat16]
    if close.size:
        reasons.append(f"{close.size} accepted nodes undecided in bfloat16 (the first is {close[0]})")
    return reasons + _untested_walk(bundle)


def _untested_walk(bundle: Bundle) -> list[str]:
    reasons = []
    accepted = int(_expected(bundle).accepted_len.sum())
    if accepted == bundle.batch:
        reasons.append("no node but the roots is accepted")
    if accepted == bundle.request.num_nodes.sum():
        reasons.append("no node is rejected")
    return reasons


def evaluate(
    bundle: Bundle,
    model: Model,
    attend: Attend,
    *,
    kernel: str,
    place: str,
    out_row_rel_l2: float,
    lse_abs: float,
    out_rel_l2: float | None = None,
    dtype: str = "float32",
) -> Verdict:
    """T0, T1 and T2 of one kernel on one complete bundle. `dtype` is the kernel's input type.

    `out_rel_l2` bounds a layer's whole output, where that is less than its worst row may be off.
    """
    budget = _budget(bundle, dtype)
    t0, comparisons = numeric(bundle, attend, out_row_rel_l2, lse_abs, out_rel_l2)
    reference = _reference_logits(bundle, model, dtype)
    logits = forward(bundle, model, attend, dtype)
    errors = logit_errors(logits, reference)
    _, _, margin = top_two(reference)
    decided = margin > 2 * budget
    t1 = _t1(logits, reference, errors, decided, budget)
    t2 = _t2(bundle, logits)
    level = "none" if t0 else "T0" if t1 else "T1" if t2 else "T2"
    max_error, min_margin = float(errors.max()), float(margin.min())
    ratio = min_margin / (2 * max_error) if max_error else math.inf
    wrong = errors > 0
    node_ratio = float((margin[wrong] / (2 * errors[wrong])).min(initial=math.inf))
    exact = level == "T2" and bool(decided.all()) and node_ratio > MARGIN_RATIO and not _untested_walk(bundle)
    outs = [c for c in comparisons if c.name.endswith("/out")]
    lses = [c for c in comparisons if c.name.endswith("/lse")]
    return Verdict(
        bundle=bundle.name,
        kernel=kernel,
        place=place,
        dtype=dtype,
        level=level,
        token_exact=exact,
        nodes=len(margin),
        decided=int(decided.sum()),
        undecided=int((~decided).sum()),
        budget=budget,
        max_logit_error=max_error,
        min_margin=min_margin,
        margin_ratio=ratio,
        node_margin_ratio=node_ratio,
        out_row_rel_l2=_worst([c.row_rel_l2 if c.same_places else math.inf for c in outs]),
        out_max_abs=_worst([c.max_abs if c.same_places else math.inf for c in outs]),
        lse_error=_worst([c.max_abs if c.same_places else math.inf for c in lses]),
        failures=(*t0, *t1, *t2),
    )


def negative_controls(
    bundle: Bundle,
    model: Model,
    *,
    out_row_rel_l2: float,
    lse_abs: float,
    out_rel_l2: float | None = None,
    call: DenseVerifyAttn | None = None,
    dtype: str = "float32",
) -> tuple[Control, ...]:
    """Give the dense op (the oracle, unless `call` is given) each wrong input in turn and see which levels notice.

    `dtype` is the kernel's input type.
    """
    if call is None:

        def call(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
            return verify_attn(q, kv, d_latent=bundle.d_latent, **arguments)

    honest = call
    budget = _budget(bundle, dtype)
    reference = _reference_logits(bundle, model, dtype)
    decided = top_two(reference)[2] > 2 * budget
    controls = []
    for name, fault in FAULTS.items():

        def faulty(q: Array, kv: Array, **arguments: Any) -> tuple[Array, Array]:
            inputs = {"q": q.copy(), "kv": kv.copy(), **arguments, "mask": arguments["mask"].copy()}
            fault(bundle, model, inputs)  # noqa: B023 - called within this iteration only
            return honest(inputs.pop("q"), inputs.pop("kv"), **inputs)

        attend = dense_attend(bundle, faulty)
        if not _changes_anything(bundle, model, fault):
            controls.append(Control(bundle.name, name, False, False, False, False, 0.0))
            continue
        t0, comparisons = numeric(bundle, attend, out_row_rel_l2, lse_abs, out_rel_l2)
        logits = forward(bundle, model, attend, dtype)
        t1 = _t1(logits, reference, logit_errors(logits, reference), decided, budget)
        worst = _worst([c.row_rel_l2 if c.same_places else math.inf for c in comparisons if c.name.endswith("/out")])
        controls.append(Control(bundle.name, name, True, bool(t0), bool(t1), bool(_t2(bundle, logits)), worst))
    return tuple(controls)


def top_two(logits: Array) -> tuple[Array, Array, Array]:
    """Per row of logits [T, V]: the best token, the second, and the gap between them. Ties go to the lower token."""
    best = logits.argmax(axis=1)
    others = logits.copy()
    others[np.arange(len(logits)), best] = -np.inf
    second = others.argmax(axis=1)
    rows = np.arange(len(logits))
    return best, second, logits[rows, best] - logits[rows, second]


def logit_errors(logits: Array, reference: Array) -> Array:
    """d_i [T]: the largest change of a logit per node; infinite where a logit is not finite."""
    errors = np.abs(logits - reference).max(axis=1)
    return np.where(np.isnan(errors), np.inf, errors)


def numeric(
    bundle: Bundle, attend: Attend, out_row_rel_l2: float, lse_abs: float, out_rel_l2: float | None = None
) -> tuple[list[str], list[Comparison]]:
    """T0 by itself, on a bundle with outputs: what it finds wrong, and all its comparisons."""
    failures: list[str] = []
    comparisons: list[Comparison] = []
    for index, layer in enumerate(bundle.layers):
        out, lse = attend(index, from_bfloat16(layer.q), from_bfloat16(layer.kv))
        assert layer.out is not None
        assert layer.lse is not None
        out_comparison = compare(out, layer.out, name=f"layers/{index}/out")
        lse_comparison = compare(lse, layer.lse, name=f"layers/{index}/lse")
        checks = [
            (out_comparison, out_comparison.within(rel_l2=out_rel_l2, row_rel_l2=out_row_rel_l2)),
            (lse_comparison, lse_comparison.within(max_abs=lse_abs)),
        ]
        for comparison, passed in checks:
            comparisons.append(comparison)
            if not passed:
                failures.append(f"T0 {comparison.report()}")
    return failures, comparisons


def _t1(logits: Array, reference: Array, errors: Array, decided: Array, budget: float) -> list[str]:
    """What T1 finds wrong."""
    beyond = np.flatnonzero(~(errors <= budget))
    if beyond.size:
        worst = int(errors.argmax())
        return [f"T1 {beyond.size} nodes move by more than D; node {worst} by {errors[worst]:.3g}"]
    best = logits.argmax(axis=1)
    contradicted = np.flatnonzero(decided & (best != reference.argmax(axis=1)))
    if contradicted.size:
        return [f"T1 decided node {contradicted[0]} has another token within the budget: the harness is wrong"]
    rows = np.arange(len(best))
    far = np.flatnonzero(~decided & (reference.max(axis=1) - reference[rows, best] > 2 * budget))
    return [f"T1 undecided node {far[0]} has a token further than 2 D below the best"] if far.size else []


def _t2(bundle: Bundle, logits: Array) -> list[str]:
    """What T2 finds wrong."""
    expected, failures = _expected(bundle), []
    best = logits.argmax(axis=1)
    for b, path in enumerate(_paths(bundle)):
        got = tree_accept(*_walk_inputs(bundle, b, best))
        if got.path != path.tolist():
            failures.append(f"T2 request {b} accepts {got.path}; expected {path.tolist()}")
        elif got.bonus != expected.bonus[b]:
            failures.append(f"T2 request {b} has bonus {got.bonus}; expected {expected.bonus[b]}")
        elif _committed(bundle, b, got.path) != expected.committed_slots[bundle.accepted(b)].tolist():
            failures.append(f"T2 request {b} commits other slots")
    return failures


def _walk_inputs(bundle: Bundle, request: int, best: Array) -> tuple[list[int], list[int], list[int]]:
    rows = bundle.nodes(request)
    return (bundle.tree.tokens[rows].tolist(), bundle.tree.parents[rows].tolist(), best[rows].tolist())


def _committed(bundle: Bundle, request: int, path: list[int]) -> list[int]:
    no_rows = np.zeros((bundle.num_slots, 0))
    return compact(no_rows, bundle.node_slots(request).tolist(), path)[1]


def _paths(bundle: Bundle) -> list[Array]:
    return [_expected(bundle).accepted_path[bundle.accepted(b)] for b in range(bundle.batch)]


def _budget(bundle: Bundle, dtype: str) -> float:
    expected = _expected(bundle)
    return expected.logit_budget if dtype == "float32" else expected.logit_budget_bfloat16


def _expected(bundle: Bundle) -> Expected:
    if bundle.expected is None:
        raise BundleError("expected", f"{bundle.name} has no expected outputs; add it with the bundle command first")
    return bundle.expected


def _reference_logits(bundle: Bundle, model: Model, dtype: str) -> Array:
    return forward(bundle, model, oracle_attend(bundle), dtype)


def _worst(values: list[float]) -> float:
    return max(values, default=0.0)


def _changes_anything(bundle: Bundle, model: Model, fault: Fault) -> bool:
    """Whether the fault changes the answer on any layer's stored inputs, beyond the order of its sums."""
    for layer in range(bundle.num_layers):
        honest = bundle.dense(layer) | {"sm_scale": bundle.sm_scale}
        inputs = bundle.dense(layer) | {"sm_scale": bundle.sm_scale}
        fault(bundle, model, inputs)
        if any(not np.array_equal(inputs[name], honest[name], equal_nan=name == "kv") for name in honest):
            return True
    return False


Fault: TypeAlias = "Callable[[Bundle, Model, dict[str, Any]], None]"


def _drop_self(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    for b in range(bundle.batch):
        prefix = int(bundle.request.prefix_len[b])
        for i in range(int(bundle.request.num_nodes[b])):
            inputs["mask"][b, i, prefix + i] = 0


def _add_sibling(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    """Every node also sees the first node that it must not see, a sibling where it has one."""
    for b in range(bundle.batch):
        parents, prefix = bundle.tree.parents[bundle.nodes(b)], int(bundle.request.prefix_len[b])
        for i, seen in enumerate(bundle.visibility(b)):
            siblings = np.flatnonzero((parents == parents[i]) & (seen == 0))
            hidden = np.flatnonzero(seen == 0)
            for key in (*siblings[:1], *hidden[:1])[:1]:
                inputs["mask"][b, i, prefix + key] = 1


def _shifted_prefix(by: int) -> Fault:
    def fault(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
        for b in range(bundle.batch):
            n, right = int(bundle.request.num_nodes[b]), int(bundle.request.prefix_len[b])
            wrong = max(right + by, 0)
            row = np.zeros((n, wrong + n), np.uint8)
            row[:, :wrong] = 1
            row[:, wrong:] = bundle.visibility(b)
            inputs["mask"][b, :n, : right + n] = 0
            kept = min(wrong, right) + n
            inputs["mask"][b, :n, :kept] = row[:, :kept]

    return fault


def _swapped_slots(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    """The root's row and the last node's change places."""
    for b in range(bundle.batch):
        root, last = int(bundle.request.prefix_len[b]), int(inputs["kv_len"][b]) - 1
        inputs["kv"][b, [root, last]] = inputs["kv"][b, [last, root]]


def _scale_without_yarn(_bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    inputs["sm_scale"] = inputs["sm_scale"] / 1.59


def _rope_zeroed(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    inputs["q"][..., bundle.d_latent :] = 0


def _sibling_link_swapped(bundle: Bundle, _model: Model, inputs: dict[str, Any]) -> None:
    """Two siblings change places in everybody's view: each, and what hangs below it, sees the other."""
    for b in range(bundle.batch):
        parents, prefix = (bundle.tree.parents[bundle.nodes(b)].tolist(), int(bundle.request.prefix_len[b]))
        pair = next(((parents.index(p), i) for i, p in enumerate(parents) if parents.index(p) < i), None)
        if pair is not None:
            columns = [prefix + node for node in pair]
            inputs["mask"][b][:, columns] = inputs["mask"][b][:, columns[::-1]]


def _positions_sequential(bundle: Bundle, model: Model, inputs: dict[str, Any]) -> None:
    """Rotary positions follow the node number instead of its depth."""
    half = bundle.d_rope // 2
    if half == 0:
        return
    for b in range(bundle.batch):
        n, prefix = int(bundle.request.num_nodes[b]), int(bundle.request.prefix_len[b])
        extra = np.arange(n) - bundle.tree.depths[bundle.nodes(b)]
        angles, _ = mla_model.rope_angles(model.config, extra)
        turn = np.exp(1j * angles)
        for rows, turns in (
            (inputs["q"][b, :n, :, bundle.d_latent :], turn[:, None]),
            (inputs["kv"][b, prefix : prefix + n, bundle.d_latent :], turn),
        ):
            pairs = (rows[..., :half] + 1j * rows[..., half:]) * turns
            rows[..., :half], rows[..., half:] = pairs.real, pairs.imag


FAULTS: dict[str, Fault] = {
    "mask_drop_self": _drop_self,
    "mask_add_sibling": _add_sibling,
    "prefix_minus_one": _shifted_prefix(-1),
    "prefix_plus_one": _shifted_prefix(+1),
    "swapped_slots": _swapped_slots,
    "scale_without_yarn": _scale_without_yarn,
    "rope_zeroed": _rope_zeroed,
    "sibling_link_swapped": _sibling_link_swapped,
    "positions_sequential": _positions_sequential,
}
