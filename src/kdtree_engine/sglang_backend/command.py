"""`kdtree-engine parity`: what a parity log says, layer by layer."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kdtree_engine.errors import KdtreeError
from kdtree_engine.sglang_backend.parity import LOG_FILES, ROW_REL_L2, Layer

if TYPE_CHECKING:
    import argparse

_BAR = 24  # characters of a full bar


def add_parser(commands: Any) -> Any:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser("parity", help="what a server's parity log says", description=parity.__doc__)
    parser.add_argument("log", type=Path, metavar="LOG", help="the file of KDTREE_ENGINE_PARITY_LOG")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparisons over time; needs matplotlib")
    parser.set_defaults(run=parity)
    return parser


def parity(options: argparse.Namespace) -> int:
    """Print a parity log: comparisons and worst differences by layer, modes, fallbacks. Exit 1 after a breach."""
    events = read(options.log)
    layers, fallbacks = summary(events)
    modes = [event for event in events if event["event"] == "mode"]
    breaches = sum(layer.breaches for layer in layers.values())
    if options.plot is not None:
        plot(events, options.plot)
    if options.json:
        found = {str(number): asdict(layer) for number, layer in sorted(layers.items())}
        body = {"schema": 1, "bound": ROW_REL_L2, "layers": found, "fallbacks": dict(fallbacks), "modes": modes}
        print(json.dumps(body, indent=1))
        return 1 if breaches else 0
    console = Console()
    table = Table("layer", "compared", "worst relL2", "worst row", f"of {ROW_REL_L2:.2g}", "worst element", "breaches")
    for number, layer in sorted(layers.items()):
        share = layer.row_rel_l2 / ROW_REL_L2
        bar = "█" * min(_BAR, round(_BAR * share)) if share == share else "NaN"
        color = "red" if layer.breaches else "green"
        figures = (f"{layer.rel_l2:.2e}", f"{layer.row_rel_l2:.2e}", f"[{color}]{bar}[/]", f"{layer.max_abs:.2e}")
        table.add_row(str(number), str(layer.compared), *figures, str(layer.breaches))
    console.print(table)
    for event in modes:
        console.print(f"mode {event['mode']}, {'kdtree-engine' if event['serving'] else 'SGLang'} serves")
    for reason in fallbacks:
        console.print(f"left to SGLang's kernel: {reason}", markup=False)
    return 1 if breaches else 0


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a log and of the files that were put aside, oldest first.

    Raises:
        KdtreeError: no such file, or a line that is none of a parity log.
    """
    files = [path.with_name(f"{path.name}.{number}") for number in range(LOG_FILES, 0, -1)]
    events = []
    for file in [*(file for file in files if file.exists()), path]:
        try:
            lines = file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise KdtreeError(f"{file}: cannot be read ({error}); pass the file of KDTREE_ENGINE_PARITY_LOG") from None
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
                event["event"], event["time"]
            except (ValueError, KeyError, TypeError):
                if number == len(lines):
                    continue  # a server that was killed may leave half a line
                raise KdtreeError(f"{file}:{number}: not a line of a parity log; pass another file") from None
            events.append(event)
    return events


def summary(events: list[dict[str, Any]]) -> tuple[dict[int, Layer], Counter[str]]:
    """What the comparisons of each layer come to, and the reasons of fallbacks."""
    layers: dict[int, Layer] = {}
    fallbacks: Counter[str] = Counter()
    for event in events:
        if event["event"] == "parity":
            layer = layers.setdefault(event["layer"], Layer())
            layer.compared += event["calls"]
            layer.breaches += not event["within"]
            for name in ("rel_l2", "row_rel_l2", "max_abs"):
                worst, value = getattr(layer, name), event[name]
                setattr(layer, name, value if value != value or value > worst else worst)
        elif event["event"] == "fallback":
            fallbacks[event["reason"]] += 1
    return layers, fallbacks


def plot(events: list[dict[str, Any]], path: Path) -> None:
    """Row differences of every comparison over time, with the bound.

    Raises:
        KdtreeError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise KdtreeError("--plot needs matplotlib; install it, or leave --plot out") from None
    compared = [event for event in events if event["event"] == "parity"]
    start = compared[0]["time"] if compared else 0.0
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    points = axes.scatter(
        [event["time"] - start for event in compared],
        [event["row_rel_l2"] for event in compared],
        c=[event["layer"] for event in compared],
        s=8,
    )
    axes.axhline(ROW_REL_L2, color="tab:red", linewidth=1)
    axes.set(xlabel="seconds", ylabel="worst row, relative L2", yscale="log")
    figure.colorbar(points, label="layer")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise KdtreeError(f"--plot: cannot write {path}: {error}; pass a .png or .svg that can be") from None
