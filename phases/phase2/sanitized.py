"""What runs under compute-sanitizer: `compute-sanitizer --tool racecheck python -m phases.phase2.sanitized`.

Every phase 2 kernel on the shapes of the host's own sanitizers, and on the smallest bundle.
"""

from __future__ import annotations

from functools import partial

from kdtree_engine import bundle as bundles
from phases.conftest import BUNDLES
from phases.paged import behind_the_dense_interface
from phases.phase2.test_host_variants import CASES
from phases.places import Place


def main() -> None:
    place = Place("cuda")
    calls = 0
    for info in place.kernels(2):
        merges = info.op == "merge_partials"
        call = partial(place.in_parts, 3) if merges else partial(place.verify_attn_paged, info.name)
        for case in CASES:
            call(**case.inputs(), **({} if merges else case.options()))
            calls += 1
        bundle = bundles.read(BUNDLES / "chain_n8.h5")
        behind_the_dense_interface(bundle, call)(**bundle.dense(0), sm_scale=bundle.sm_scale)
        calls += 1
    print(f"{calls} calls")


if __name__ == "__main__":
    main()
