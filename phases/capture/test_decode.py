"""The decode loop and the ops of a round where torch is: against the drafter as trained and transformers' own text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from kdtree_engine.decode import Decoder, DflashDrafter, MlaModel, arrays_for, read_weights
from kdtree_engine.decode.loop import LOGIT_BUDGET
from phases.capture.test_torch_op import array, tensor
from phases.conftest import ROOT
from phases.places import Place
from phases.rounds import CASES, differences
from phases.tiny_model import drafter as torch_drafter
from phases.tiny_model import model as torch_model
from phases.tiny_model.decode import greedy

if TYPE_CHECKING:
    import numpy.typing as npt

TINY = ROOT / "fixtures" / "tiny_model"
HOST = arrays_for("host")


class CpuTensors(Place):
    """The host library on torch CPU tensors."""

    def strided(self, array: npt.NDArray[Any]) -> Any:
        return tensor(array)

    def array(self, tensor: Any) -> npt.NDArray[Any]:
        return array(tensor)


@pytest.mark.parametrize("op", CASES)
def test_ops_of_a_round_take_cpu_tensors(op: str) -> None:
    place = CpuTensors("host")
    for case in CASES[op][::4]:
        assert not differences(case.run(place), case.answer()), case


def test_drafter_is_the_one_that_was_trained() -> None:
    """Log-probabilities in float32, at several lengths of what came before; both sum in orders of their own."""
    weights, config = read_weights(TINY, "drafter.safetensors", "drafter.json")
    ours = DflashDrafter(weights, config, HOST)
    theirs = torch_drafter.build(TINY / "drafter.safetensors", TINY / "drafter.json")
    embedding = read_weights(TINY, "target.safetensors", "config.json")[0]["model.embed_tokens.weight"]
    rng = np.random.default_rng(0)
    for length in (1, 5, 255, 256, 257, 600):
        states = rng.standard_normal((length, 1024)).astype(np.float32)
        tokens = rng.integers(0, 256, length + 1).tolist()
        found = ours.draft(tokens, states, embedding)
        right = theirs.draft(torch.from_numpy(states), tokens[-1], length, torch.from_numpy(embedding))
        np.testing.assert_allclose(found, right.numpy(), atol=1e-3)


def test_text_is_that_of_transformers() -> None:
    """Its model in float32, without any rounding of ours: equal up to a token that it might as well have turned."""
    target = torch_model.build(TINY / "target.safetensors")
    weights, config = read_weights(TINY, "target.safetensors", "config.json")
    model = MlaModel(weights, config, HOST)
    drafter = DflashDrafter(*read_weights(TINY, "drafter.safetensors", "drafter.json"), HOST)
    compared = 0
    for prompt in (b"def ", b"class Reader:\n", b"for key, value in "):
        rounds = list(Decoder(model, drafter, budget=16).generate([list(prompt)], 64))
        found = [token for done in rounds for token in done.new]
        margins = [margin for done in rounds for margin in done.margins]
        right = greedy(target, list(prompt), 64)
        same = next((i for i in range(64) if found[i] != right[i]), 64)
        compared += same
        assert same == 64 or margins[same] < 2 * LOGIT_BUDGET
    assert compared >= 96
