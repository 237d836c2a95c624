"""What a bundle holds, for people and as a dict: axes, sizes, provenance, trees with margins and the accepted path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from kdtree_engine.bundle import Bundle, datasets

if TYPE_CHECKING:
    from rich.console import Console


def summary(bundle: Bundle) -> dict[str, Any]:
    """The bundle without its large arrays, ready for JSON."""
    return {
        "name": bundle.name,
        "origin": bundle.origin,
        "model": bundle.model,
        "num_heads": bundle.num_heads,
        "d_latent": bundle.d_latent,
        "d_rope": bundle.d_rope,
        "sm_scale": bundle.sm_scale,
        "page_size": bundle.page_size,
        "num_slots": bundle.num_slots,
        "num_layers": bundle.num_layers,
        "provenance": dict(bundle.provenance),
        "datasets": [
            {
                "path": path,
                "axes": spec.axes,
                "logical_dtype": spec.logical_dtype,
                "shape": list(array.shape),
                "bytes": array.nbytes,
            }
            for path, array, spec in datasets(bundle)
        ],
        "requests": [_request(bundle, b) for b in range(bundle.batch)],
        "expected": _expected(bundle),
    }


def _request(bundle: Bundle, b: int) -> dict[str, Any]:
    rows = bundle.nodes(b)
    result: dict[str, Any] = {
        "prefix_len": int(bundle.request.prefix_len[b]),
        "num_nodes": int(bundle.request.num_nodes[b]),
        "tokens": bundle.tree.tokens[rows].tolist(),
        "parents": bundle.tree.parents[rows].tolist(),
        "depths": bundle.tree.depths[rows].tolist(),
    }
    if bundle.expected is not None:
        expected = bundle.expected
        result |= {
            "argmax": expected.argmax[rows].tolist(),
            "margins": expected.margin[rows].tolist(),
            "accepted_path": expected.accepted_path[bundle.accepted(b)].tolist(),
            "bonus": int(expected.bonus[b]),
            "committed_slots": expected.committed_slots[bundle.accepted(b)].tolist(),
        }
    return result


def _expected(bundle: Bundle) -> dict[str, Any] | None:
    if bundle.expected is None:
        return None
    expected, counts = bundle.expected, {}
    for dtype, budget in (("float32", expected.logit_budget), ("bfloat16", expected.logit_budget_bfloat16)):
        decided = int((expected.margin > 2 * budget).sum())
        counts[dtype] = {"budget": budget, "decided": decided, "undecided": len(expected.margin) - decided}
    return {"min_margin": float(expected.margin.min()), **counts}


def show(bundle: Bundle, console: Console) -> None:
    """Print the bundle: a head, the table of datasets, one tree a request."""
    facts = summary(bundle)
    console.print(f"[bold]{escape(bundle.name)}[/bold]  {bundle.origin}, model {bundle.model}")
    console.print(
        f"{bundle.batch} requests, {bundle.num_layers} layers, {bundle.num_heads} heads, "
        f"latent/rope {bundle.d_latent}/{bundle.d_rope}, scale {bundle.sm_scale:.9g}, "
        f"{bundle.num_slots} slots in pages of {bundle.page_size}"
    )
    for key, value in facts["provenance"].items():
        console.print(f"  {escape(str(key))}: {escape(str(value))}")
    console.print(_dataset_table(facts["datasets"]))
    for b, request in enumerate(facts["requests"]):
        console.print(_drawing(b, request, bundle.expected.logit_budget if bundle.expected else None))
    if facts["expected"] is None:
        console.print("no expected outputs: add the bundle to compute them")
        return
    for dtype in ("float32", "bfloat16"):
        count = facts["expected"][dtype]
        console.print(f"{dtype}: D {count['budget']:.3g}, decided {count['decided']}, undecided {count['undecided']}")
    console.print(f"smallest margin {facts['expected']['min_margin']:.3g}")


def _dataset_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("dataset", "axes", "shape", "dtype"):
        table.add_column(name)
    table.add_column("bytes", justify="right")
    for row in rows:
        shape = " ".join(str(size) for size in row["shape"])
        table.add_row(row["path"], row["axes"], shape, row["logical_dtype"], f"{row['bytes']:,}")
    return table


def _drawing(index: int, request: dict[str, Any], budget: float | None) -> Tree:
    """The request's tree; accepted nodes are bold and starred, undecided ones say so."""
    path = set(request.get("accepted_path", []))

    def label(i: int) -> str:
        text = f"{i}: token {request['tokens'][i]}"
        if budget is not None:
            margin = request["margins"][i]
            text += f" -> {request['argmax'][i]}, margin {margin:.3g}"
            text += "" if margin > 2 * budget else " undecided"
        return f"[bold green]* {text}[/bold green]" if i in path else text

    title = f"request {index}: prefix {request['prefix_len']}, {request['num_nodes']} nodes"
    if path:
        title += f", accepted {request['accepted_path']}, bonus {request['bonus']}"
    drawing = Tree(escape(title))
    branches = [drawing.add(label(0))]
    for i in range(1, request["num_nodes"]):
        branches.append(branches[request["parents"][i]].add(label(i)))
    return drawing
