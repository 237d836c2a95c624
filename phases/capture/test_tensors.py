"""torch tensors that no kernel can take, where torch is installed but no GPU need be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kdtree_engine import KernelError, verify_attn


def test_cpu_tensor_is_refused() -> None:
    """The GPU library takes CUDA tensors, the host library NumPy arrays; a CPU tensor has to say which it wants."""
    with pytest.raises(KernelError, match=r"torch tensor on cpu.*or pass NumPy") as raised:
        verify_attn(torch.zeros(1, 2, 4, 576), torch.zeros(1, 8, 576), sm_scale=0.1)
    assert raised.value.argument == "q"


@pytest.mark.parametrize("name", ["kv", "mask", "kv_len"])
def test_tensor_among_arrays_is_refused(name: str) -> None:
    arguments: dict[str, Any] = {
        "kv": np.zeros((1, 8, 576), np.float32),
        "mask": np.ones((1, 2, 8), np.uint8),
        "kv_len": np.full(1, 8, np.int32),
    }
    arguments[name] = torch.from_numpy(arguments[name])
    with pytest.raises(KernelError, match=r"got a torch\.Tensor, expected a NumPy array") as raised:
        verify_attn(np.zeros((1, 2, 4, 576), np.float32), **arguments, sm_scale=0.1)
    assert raised.value.argument == name
