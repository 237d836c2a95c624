"""What runs under compute-sanitizer: `compute-sanitizer --tool memcheck python -m phases.phase2.sanitized attention`.

With "attention" verify_attn_paged and merge_partials, with "rounds" the ops of a round, on the cases of the host's own
sanitizers; attention on the smallest bundle too.
"""

from __future__ import annotations

import sys
from functools import partial

from kdtree_engine import bundle as bundles
from phases.conftest import BUNDLES
from phases.paged import behind_the_dense_interface
from phases.phase2.test_host_variants import CASES
from phases.places import Place
from phases.rounds import CASES as ROUND_CASES


def attention(place: Place) -> int:
    """Runs verify_attn_paged and merge_partials; how often."""
    calls = 0
    for info in place.kernels(2):
        if info.op in ROUND_CASES:
            continue
        merges = info.op == "merge_partials"
        call = partial(place.in_parts, 3) if merges else partial(place.verify_attn_paged, info.name)
        for case in CASES:
            call(**case.inputs(), **({} if merges else case.options()))
            calls += 1
        bundle = bundles.read(BUNDLES / "chain_n8.h5")
        behind_the_dense_interface(bundle, call)(**bundle.dense(0), sm_scale=bundle.sm_scale)
        calls += 1
    return calls


def rounds(place: Place) -> int:
    """Runs tree_build, tree_accept and kv_compact; how often."""
    cases = [case for cases in ROUND_CASES.values() for case in cases]
    for case in cases:
        case.run(place)
    return len(cases)


if __name__ == "__main__":
    calls = {"attention": attention, "rounds": rounds}[sys.argv[1]](Place("cuda"))
    print(f"{calls} calls")
