"""Make, add, check and show bundles: python -m phases.bundles --help

Exit codes: 0 all well, 1 a bundle was refused or differs from the oracle, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from kdtree_engine import bundle as bundles
from kdtree_engine.compare import compare
from kdtree_engine.errors import BundleError
from kdtree_engine.ops.verify_attn import OUT_ROW_REL_L2
from kdtree_engine.ops.verify_attn_paged import OUT_REL_L2
from kdtree_engine.show import show, summary
from oracle.tree_build import tree_build
from phases import exactness

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kdtree_engine.bundle import Bundle

ROOT = exactness.FIXTURES / "bundles"
# Of those without weights only the attention can be checked; phase 2 does.
WEIGHTLESS = exactness.FIXTURES / "weightless"
# All of fixtures/ is cloned with the repository.
MAX_FIXTURE_BYTES = 32 << 20

# Expected outputs are float64 results rounded to float32. Recomputed elsewhere the last bit may differ, not more.
RECOMPUTED_REL_L2 = 2.0**-23
# D is a maximum over float64 forwards in fixed directions; only the library's order of sums differs between machines.
RECOMPUTED_BUDGET_REL = 1e-3


def complete(bundle: Bundle) -> Bundle:
    """The bundle with the oracle's outputs, round and budgets; BundleError if its model is not at hand.

    One without weights stays as it is: no round follows from it, and phase 2 asks the oracle itself.
    """
    if bundle.model == "none":
        return bundle
    return exactness.complete(
        bundle,
        exactness.load_model(bundle),
        out_row_rel_l2=OUT_ROW_REL_L2,
        bfloat16_out_row_rel_l2=OUT_REL_L2,
    )


def problems(bundle: Bundle) -> list[str]:
    """Why a complete bundle must not ship; empty if it may."""
    reasons = [*_provenance_problems(bundle), *_tree_problems(bundle)]
    return reasons if bundle.model == "none" else [*reasons, *exactness.shortcomings(bundle)]


def _provenance_problems(bundle: Bundle) -> list[str]:
    texts = json.dumps(dict(bundle.provenance))
    reasons = [f"provenance lacks {key!r}" for key in ("generator",) if key not in bundle.provenance]
    if any(mark in texts for mark in ('"/', '"~', ":\\\\", "file://")):
        reasons.append("provenance holds a path of a machine")
    if bundle.origin == "captured" and bundle.model != "none" and bundle.witness is None:
        reasons.append("a captured bundle needs the model's own logits (witness)")
    return reasons


def _tree_problems(bundle: Bundle) -> list[str]:
    """Where the stored trees are not the ones that the drafter's marginals give."""
    if bundle.drafter is None:
        return []
    reasons = []
    for b in range(bundle.batch):
        rows = bundle.nodes(b)
        tree = tree_build(
            bundle.drafter.log_probs[b],
            bundle.drafter.token_ids[b],
            int(bundle.drafter.budget[b]),
            int(bundle.tree.tokens[rows][0]),
        )
        if tree.status:
            reasons.append(f"request {b}: drafter: row {tree.usable_depth} is bad ({tree.status.name})")
            continue
        for name in ("tokens", "parents", "depths"):
            if not np.array_equal(getattr(tree, name), getattr(bundle.tree, name)[rows]):
                reasons.append(f"request {b}: tree/{name} differ from the tree of its drafter")
    return reasons


def differences(stored: Bundle, fresh: Bundle) -> list[str]:
    """Where a stored bundle's expected outputs differ from freshly computed ones."""
    if stored.expected is None or fresh.expected is None:
        return ["there are no expected outputs"]
    found = []
    recomputed = {name: array for name, array, _ in bundles.datasets(fresh)}
    for name, array, _ in bundles.datasets(stored):
        if not name.startswith(("layers/", "expected/")):
            continue
        if array.dtype == np.float32:
            comparison = compare(array, recomputed[name], name=name)
            if not comparison.within(row_rel_l2=RECOMPUTED_REL_L2):
                found.append(comparison.report())
        elif not np.array_equal(array, recomputed[name]):
            found.append(f"{name} differs from the oracle's")
    for name in ("logit_budget", "logit_budget_bfloat16"):
        old, new = getattr(stored.expected, name), getattr(fresh.expected, name)
        if abs(old - new) > RECOMPUTED_BUDGET_REL * new:
            found.append(f"expected/{name} is {old:.6g}; the oracle gives {new:.6g}")
    return found


def add(path: Path, *, root: Path | None = None, name: str | None = None, replace: bool = False) -> Path:
    """Validate a bundle, compute its expected outputs, and place it as root/<name>.h5; root is ROOT, or WEIGHTLESS.

    `name` is another one than the bundle came with.

    BundleError, with every reason, if it is invalid or not token-exact-testable, if another bundle has its name, or if
    fixtures would grow too large. The file appears whole or not at all.
    """
    finished = complete(bundles.read(path))
    if name is not None:
        finished = dataclasses.replace(finished, name=name)
        bundles.validate(finished)
    reasons = problems(finished)
    if reasons:
        raise BundleError("bundle", f"{finished.name} is refused: {'; '.join(reasons)}")
    if root is None:
        root = WEIGHTLESS if finished.model == "none" else ROOT
    target = root / f"{finished.name}.h5"
    if target.exists() and not replace:
        raise BundleError("name", f"{target.name} exists; choose another name, or say --replace")
    root.mkdir(parents=True, exist_ok=True)
    bundles.write(target, finished)
    return target


def check(path: Path) -> list[str]:
    """What is wrong with a bundle: unreadable, different from the oracle's answers, or not testable."""
    try:
        stored = bundles.read(path)
        fresh = complete(stored)
    except BundleError as error:
        return [str(error)]
    reasons = [] if stored.model == "none" else differences(stored, fresh)
    if path.stem != stored.name:
        reasons.append(f"name is {stored.name!r}; expected the file's, {path.stem!r}")
    return reasons or problems(fresh)


def fixture_bytes(root: Path = exactness.FIXTURES) -> int:
    """Size of everything under fixtures/."""
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def _run_add(arguments: argparse.Namespace) -> int:
    target = add(arguments.file, root=arguments.root, name=arguments.name, replace=arguments.replace)
    print(f"added {target.name} ({target.stat().st_size:,} bytes)")
    return 0


def _run_check(arguments: argparse.Namespace) -> int:
    roots = [ROOT, WEIGHTLESS] if arguments.root is None else [arguments.root]
    paths = arguments.files or [path for root in roots for path in bundles.find(root)]
    results = {path.name: check(path) for path in paths}
    total = fixture_bytes()
    if total > MAX_FIXTURE_BYTES:
        results["fixtures"] = [f"fixtures/ holds {total:,} bytes; at most {MAX_FIXTURE_BYTES:,}"]
    if not paths:
        results["bundles"] = [f"there is none under {roots[0]}"]
    if arguments.json:
        print(json.dumps({"fixture_bytes": total, "bundles": results}, indent=2))
    else:
        for name, reasons in results.items():
            print(f"{name}: {'; '.join(reasons) if reasons else 'ok'}")
        print(f"{len(paths)} bundles, fixtures {total:,} of {MAX_FIXTURE_BYTES:,} bytes")
    return 1 if any(results.values()) else 0


def _run_show(arguments: argparse.Namespace) -> int:
    bundle = bundles.read(arguments.file)
    if arguments.json:
        print(json.dumps(summary(bundle), indent=2))
    else:
        show(bundle, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bundles", description="Make, add, check and show bundles.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make", help="make the bundles of the repository again (needs torch)", add_help=False)
    adding = commands.add_parser("add", help="validate a bundle, compute its expected outputs and place it")
    adding.add_argument("file", type=Path)
    adding.add_argument("--root", type=Path, help="the folder to place it in; default: the one for its kind")
    adding.add_argument("--name", help="another name than the bundle came with")
    adding.add_argument("--replace", action="store_true", help="replace the bundle of that name")
    adding.set_defaults(run=_run_add)
    checking = commands.add_parser("check", help="read bundles and compare them with the oracle")
    checking.add_argument("files", type=Path, nargs="*", help="all that there are if none is given")
    checking.add_argument("--root", type=Path, help="where to look; default: in fixtures")
    checking.add_argument("--json", action="store_true")
    checking.set_defaults(run=_run_check)
    showing = commands.add_parser("show", help="print axes, sizes, provenance, trees and margins")
    showing.add_argument("file", type=Path)
    showing.add_argument("--json", action="store_true")
    showing.set_defaults(run=_run_show)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["make"]:
        from phases import make_bundles  # needs torch, which the other commands do not

        result: Any = make_bundles.main(argv[1:])
        return int(result or 0)
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except BundleError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
