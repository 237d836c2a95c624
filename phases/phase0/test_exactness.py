"""The judge: right kernels pass every level, wrong ones fail at their level, and the controls are detected."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kdtree_engine.errors import BundleError
from kdtree_engine.ops.verify_attn import LSE_ABS, OUT_ROW_REL_L2
from kdtree_engine.ops.verify_attn_paged import OUT_REL_L2
from oracle.verify_attn import verify_attn
from phases import exactness, synthetic
from phases.exactness import FAULTS, Control, Verdict

if TYPE_CHECKING:
    from kdtree_engine.bundle import Bundle
    from phases.exactness import Attend

BOUNDS: dict[str, Any] = {"out_row_rel_l2": OUT_ROW_REL_L2, "lse_abs": LSE_ABS}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"shape": "chain"},
    "branches": {"num_nodes": (9,)},
    "ragged": {"prefix_len": (0, 1, 21), "num_nodes": (1, 4, 9), "num_heads": 2, "page_size": 8, "shape": "drafter"},
}


@functools.cache
def bundle_of(shape: str) -> Bundle:
    return synthetic.testable(1, **SHAPES[shape], out_row_rel_l2=OUT_ROW_REL_L2, bfloat16_out_row_rel_l2=OUT_REL_L2)


@functools.cache
def controls_of(shape: str) -> tuple[Control, ...]:
    return exactness.negative_controls(bundle_of(shape), exactness.load_model(bundle_of(shape)), **BOUNDS)


def judge(bundle: Bundle, attend: Attend, **arguments: Any) -> Verdict:
    model = exactness.load_model(bundle)
    return exactness.evaluate(bundle, model, attend, kernel="test", place="numpy", **BOUNDS | arguments)


def off_by(bundle: Bundle, relative: float, seed: int = 0) -> Attend:
    """The oracle with every output row moved by a share of its length, in random directions."""
    exact, rng = exactness.oracle_attend(bundle), np.random.default_rng(seed)

    def attend(layer: int, q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, lse = exact(layer, q, kv)
        noise = rng.standard_normal(out.shape)
        noise *= np.linalg.norm(out, axis=-1, keepdims=True) / np.linalg.norm(noise, axis=-1, keepdims=True)
        return out + relative * noise, lse

    return attend


@pytest.mark.parametrize("shape", SHAPES)
def test_oracle_is_token_exact(shape: str) -> None:
    bundle = bundle_of(shape)
    verdict = judge(bundle, exactness.oracle_attend(bundle))
    assert verdict.token_exact
    assert verdict.level == "T2"
    assert verdict.failures == ()
    assert (verdict.nodes, verdict.undecided, verdict.max_logit_error) == (verdict.decided, 0, 0)
    assert math.isinf(verdict.margin_ratio)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_any_kernel_within_the_bound_is_token_exact(shape: str, seed: int) -> None:
    """What D promises: whatever passes T0 stays within the budget, and the margin ratio above 4."""
    bundle = bundle_of(shape)
    verdict = judge(bundle, off_by(bundle, 0.9 * OUT_ROW_REL_L2, seed))
    assert verdict.token_exact
    assert 0 < verdict.max_logit_error <= verdict.budget
    assert exactness.MARGIN_RATIO < verdict.margin_ratio < math.inf
    assert verdict.margin_ratio == pytest.approx(verdict.min_margin / (2 * verdict.max_logit_error))


def test_a_kernel_beyond_the_bound_fails_t0_and_nothing_else_hides_it() -> None:
    bundle = bundle_of("branches")
    verdict = judge(bundle, off_by(bundle, 1.5 * OUT_ROW_REL_L2))
    assert verdict.level == "none"
    assert not verdict.token_exact
    assert verdict.failures[0].startswith("T0 layers/0/out: ")
    assert verdict.out_row_rel_l2 == pytest.approx(1.5 * OUT_ROW_REL_L2, rel=1e-2)


def test_the_budget_is_not_the_kernels_own_error() -> None:
    """A kernel that is far off must fail T1, not turn its failures into undecided nodes."""
    bundle = bundle_of("branches")
    verdict = judge(bundle, off_by(bundle, 0.3), out_row_rel_l2=1.0)
    assert verdict.level == "T0"
    assert verdict.undecided == 0
    assert verdict.max_logit_error > verdict.budget
    assert verdict.failures[0].startswith("T1 ")


def test_only_the_lse_wrong_fails_t0() -> None:
    bundle = bundle_of("branches")
    exact = exactness.oracle_attend(bundle)
    verdict = judge(bundle, lambda *inputs: (exact(*inputs)[0], exact(*inputs)[1] / np.log(2)))
    assert verdict.level == "none"
    assert all("/lse" in failure for failure in verdict.failures)
    assert verdict.lse_error > LSE_ABS


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_kernel_that_gives_no_numbers_fails_without_an_exception(value: float) -> None:
    bundle = bundle_of("branches")
    exact = exactness.oracle_attend(bundle)

    def attend(layer: int, q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, lse = exact(layer, q, kv)
        out[3, 1, 5] = value
        return out, lse

    with np.errstate(invalid="ignore", over="ignore"):
        verdict = judge(bundle, attend)
    assert verdict.level == "none"
    assert math.isinf(verdict.max_logit_error)
    assert math.isinf(verdict.out_row_rel_l2)
    assert json.loads(json.dumps(verdict.as_dict(), allow_nan=False))["max_logit_error"] is None


def test_a_fault_in_an_upper_layer_alone_is_found() -> None:
    bundle = bundle_of("branches")
    exact = exactness.oracle_attend(bundle)

    def attend(layer: int, q: np.ndarray, kv: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, lse = exact(layer, q, kv)
        return (out if layer == 0 else out[:, ::-1]), lse

    verdict = judge(bundle, attend)
    assert verdict.level == "none"
    assert verdict.failures[0].startswith("T0 layers/1/out: ")
    assert any(failure.startswith("T1 ") for failure in verdict.failures)


def with_expected(bundle: Bundle, **changes: Any) -> Bundle:
    assert bundle.expected is not None
    return dataclasses.replace(bundle, expected=dataclasses.replace(bundle.expected, **changes))


def test_another_round_fails_t2() -> None:
    bundle = bundle_of("branches")
    assert bundle.expected is not None
    verdict = judge(with_expected(bundle, bonus=bundle.expected.bonus + 1), exactness.oracle_attend(bundle))
    assert verdict.level == "T1"
    assert verdict.failures[0].startswith("T2 request 0 has bonus ")
    path = bundle.expected.accepted_path[:-1]
    shorter = with_expected(
        bundle,
        accepted_path=path,
        accepted_len=bundle.expected.accepted_len - 1,
        committed_slots=bundle.expected.committed_slots[:-1],
    )
    verdict = judge(shorter, exactness.oracle_attend(bundle))
    assert verdict.failures[0].startswith("T2 request 0 accepts ")


def test_undecided_nodes_count_neither_way_and_are_reported() -> None:
    """With a budget as large as the margins, nodes are undecided: levels pass, "token-exact" is not said."""
    bundle = bundle_of("branches")
    assert bundle.expected is not None
    large = float(np.median(bundle.expected.margin))
    verdict = judge(with_expected(bundle, logit_budget=large), exactness.oracle_attend(bundle))
    assert verdict.level == "T2"
    assert verdict.undecided == (bundle.expected.margin <= 2 * large).sum() > 0
    assert not verdict.token_exact
    assert "undecided" in verdict.as_line()
    reasons = exactness.shortcomings(with_expected(bundle, logit_budget=large))
    assert any("undecided nodes in float32" in reason for reason in reasons)


def test_shortcomings_name_each_reason() -> None:
    bundle = bundle_of("branches")
    assert bundle.expected is not None
    assert exactness.shortcomings(bundle) == []
    margin = float(bundle.expected.margin.min())
    tight = exactness.shortcomings(with_expected(bundle, logit_budget=margin / 3))
    assert tight == [f"margin ratio {3 / 2:.3g} at the budget D; more than 4 is needed"]
    coarse = exactness.shortcomings(with_expected(bundle, logit_budget_bfloat16=1e3))
    assert "undecided in bfloat16" in coarse[0]


def test_bfloat16_inputs_have_their_own_budget() -> None:
    bundle = bundle_of("branches")
    assert bundle.expected is not None
    verdict = judge(bundle, off_by(bundle, 0.5 * OUT_REL_L2), dtype="bfloat16", out_row_rel_l2=OUT_REL_L2)
    assert verdict.budget == bundle.expected.logit_budget_bfloat16
    assert verdict.level == "T2"
    assert verdict.max_logit_error > bundle.expected.logit_budget


@pytest.mark.parametrize("shape", SHAPES)
def test_every_control_that_applies_is_detected(shape: str) -> None:
    controls = controls_of(shape)
    assert [control.name for control in controls] == list(FAULTS)
    for control in controls:
        assert control.detected == control.applicable, control.as_line()


def test_every_control_applies_somewhere_and_only_where_it_can() -> None:
    applies = {name: {c.name for c in controls_of(name) if c.applicable} for name in SHAPES}
    assert set().union(*applies.values()) == set(FAULTS)
    assert set(FAULTS) - applies["chain"] == {"sibling_link_swapped", "positions_sequential"}


def test_controls_record_what_the_higher_levels_noticed() -> None:
    controls = {control.name: control for control in controls_of("branches")}
    assert controls["mask_drop_self"].t1_noticed
    for control in controls.values():
        # T2 looks at tokens only: what it notices T1 has noticed.
        assert control.t1_noticed >= control.t2_noticed
        assert json.loads(json.dumps(control.as_dict(), allow_nan=False))["name"] == control.name


def test_controls_run_on_the_kernel_that_is_given() -> None:
    """A kernel that ignores its mask cannot tell the mask controls from the truth: T0 fails for all alike."""
    bundle = bundle_of("branches")
    calls = []

    def call(q: np.ndarray, kv: np.ndarray, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
        calls.append(arguments["sm_scale"])
        return verify_attn(q, kv, **arguments)

    exactness.negative_controls(bundle, exactness.load_model(bundle), call=call, **BOUNDS)
    assert min(calls) == pytest.approx(bundle.sm_scale / 1.59)
    assert max(calls) == bundle.sm_scale


def test_lines_carry_every_figure() -> None:
    bundle = bundle_of("ragged")
    verdict = judge(bundle, off_by(bundle, 0.5 * OUT_ROW_REL_L2))
    line = verdict.as_line()
    for part in (
        bundle.name,
        "test",
        "numpy float32",
        "token-exact",
        "nodes ",
        "undecided 0",
        "D ",
        "max d ",
        "min m ",
    ):
        assert part in line
    for part in ("margin ratio ", "row relL2 ", "max abs ", "lse error "):
        assert part in line
    assert "\n" not in line
    assert set(verdict.as_dict()) == {field.name for field in dataclasses.fields(Verdict)}


def test_a_bundle_without_weights_or_of_another_model_is_refused() -> None:
    bundle = bundle_of("chain")
    nameless = dataclasses.replace(bundle, model="none", model_config=None, model_seed=None)
    with pytest.raises(BundleError) as error:
        exactness.load_model(nameless)
    assert error.value.argument == "model"
    with pytest.raises(BundleError, match="num_hidden_layers = 2") as error:
        exactness.load_model(dataclasses.replace(bundle, layers=bundle.layers[:1]))
    assert error.value.argument == "layers"
    with pytest.raises(BundleError, match="restore fixtures/tiny_model") as error:
        exactness.load_model(
            dataclasses.replace(bundle, model="tiny_model", model_config=None, model_seed=None),
            exactness.FIXTURES / "none",
        )
    assert error.value.argument == "model"


def test_an_incomplete_bundle_is_refused() -> None:
    bundle = synthetic.synthetic(1, num_heads=1)
    with pytest.raises(BundleError) as error:
        judge(bundle, exactness.oracle_attend(bundle))
    assert error.value.argument == "expected"


def test_the_oracle_is_token_exact_on_every_committed_bundle(bundle: Bundle) -> None:
    model = exactness.load_model(bundle)
    verdict = exactness.evaluate(
        bundle, model, exactness.oracle_attend(bundle), kernel="oracle", place="numpy", **BOUNDS
    )
    assert verdict.token_exact, verdict.as_line()


def test_controls_are_detected_on_every_committed_bundle(bundle: Bundle) -> None:
    for control in exactness.negative_controls(bundle, exactness.load_model(bundle), **BOUNDS):
        assert control.detected == control.applicable, control.as_line()


def test_the_oracle_agrees_with_the_witness_on_decided_tokens(bundle: Bundle) -> None:
    """The model's own float32 forward and the oracle differ by the bfloat16 rounding of the stored inputs.

    Where the oracle's margin exceeds twice the largest difference, they must agree on the token.
    """
    assert bundle.expected is not None
    assert bundle.witness is not None
    gap = np.abs(bundle.witness.logits - bundle.expected.logits).max()
    clear = bundle.expected.margin > 2 * gap
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(bundle.witness.logits.argmax(axis=1)[clear], bundle.expected.argmax[clear])
