"""What runs under compute-sanitizer: `compute-sanitizer --tool racecheck python -m phases.phase1.sanitized`.

Every phase 1 kernel, once, on every bundle's first layer and on small shapes of each row tile, geometry and split.
"""

from __future__ import annotations

import math
from typing import Any

from kdtree_engine import bundle as bundles
from phases.conftest import BUNDLES
from phases.phase1.test_shapes import Case
from phases.places import Place

CASES = [
    Case(2, 1, 5, 70, split_tokens=64),
    Case(2, 3, 8, 150, split_tokens=64, mask="nothing"),
    Case(2, 9, 8, 200, split_tokens=128, mask="tree"),
    Case(1, 9, 10, 130, 512, 0),
    Case(1, 3, 10, 130, 256, 64, split_tokens=64),
    Case(1, 9, 10, 130, 256, 32, split_tokens=64),
]


def main() -> None:
    place = Place("cuda")
    calls = 0
    for info in place.kernels(1):
        for path in bundles.find(BUNDLES):
            bundle = bundles.read(path)
            inputs: dict[str, Any] = bundle.dense(0, math.nan)
            place.verify_attn(info.name, **inputs, sm_scale=bundle.sm_scale, d_latent=bundle.d_latent)
            calls += 1
        for case in CASES:
            place.verify_attn(info.name, **case.inputs(), split_tokens=case.split_tokens)
            calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
