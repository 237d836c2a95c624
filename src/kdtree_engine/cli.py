"""The command `kdtree-engine`.

Exit status: 0 yes; 1 no: a status is not met, a file is refused, a tool is missing; 2 misuse.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from kdtree_engine import __version__, bundle, capture, evidence, toolchain
from kdtree_engine._native import FILE_NAMES, Library, library
from kdtree_engine.decode import command as decode_command
from kdtree_engine.errors import KdtreeError, KernelError
from kdtree_engine.sglang_backend import command as parity_command
from kdtree_engine.show import show, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLES = {"proven": "green", "stale": "yellow", "failing": "bold red", "unproven": "dim"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; every error raised on purpose becomes one line on standard error and status 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # These two have a command line of their own, --help included.
    if arguments[:1] == ["capture"]:
        return capture.main(arguments[1:])
    if arguments[:1] == ["toolchain"]:
        return toolchain.main(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        status = int(options.run(options))
        # A short answer is still buffered here; a closed pipe has to show while it can be caught.
        sys.stdout.flush()
        return status
    except KdtreeError as error:
        print(f"kdtree-engine: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        # A reader that has seen enough (head, less) is no news. What is still buffered must not fail again at exit.
        if not isinstance(error, BrokenPipeError):
            print(f"kdtree-engine: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kdtree-engine", description="Tree-verify attention kernels and what is proven of them."
    )
    parser.add_argument("--version", action="version", version=f"kdtree-engine {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    kernels = commands.add_parser(
        "kernels", help="list the kernels of the libraries here", description=_kernels.__doc__
    )
    kernels.set_defaults(run=_kernels)

    status = commands.add_parser("status", help="which phase is proven where", description=_status.__doc__)
    status.add_argument(
        "--require",
        action="append",
        type=_requirement,
        default=[],
        metavar="PHASE@PLACE",
        help="exit 1 unless it is proven, as phase1@host",
    )
    status.set_defaults(run=_status)

    bundles = commands.add_parser("bundle", help="look at a bundle", description="Look at a bundle.")
    actions = bundles.add_subparsers(metavar="ACTION", required=True)
    shown = actions.add_parser(
        "show", help="axes, provenance, trees and margins of a bundle", description=_show.__doc__
    )
    shown.add_argument("file", type=Path, metavar="FILE")
    shown.set_defaults(run=_show)

    generate = decode_command.add_parser(commands)
    parity = parity_command.add_parser(commands)

    for one in (kernels, status, shown, generate, parity):
        one.add_argument("--json", action="store_true", help="print JSON")
    # Listed here for --help; main() hands them over before this parser sees them.
    commands.add_parser("capture", help="record a verify step of a transformers model", add_help=False)
    commands.add_parser("toolchain", help="compilers and disassemblers of this machine", add_help=False)
    return parser


def _requirement(text: str) -> str:
    try:
        evidence.unmet([], [text])
    except KdtreeError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--require: ")) from error
    return text


def _libraries() -> list[Library]:
    """The libraries that are here, host first; KernelError when there is none."""
    found = []
    for place in FILE_NAMES:
        try:
            found.append(library("cuda" if place == "cuda" else "host"))
        except KernelError as error:
            missing = error
    if not found:
        raise missing
    return found


def _kernels(options: argparse.Namespace) -> int:
    """List the kernels of the libraries here. Needs neither a GPU nor a driver."""
    libraries = _libraries()
    if options.json:
        rows = [
            {"place": one.place, "archs": one.archs, "path": str(one.path), "kernels": [asdict(k) for k in one.kernels]}
            for one in libraries
        ]
        _print_json({"schema": 1, "libraries": rows})
        return 0
    table = Table("kernel", "op", "dtype", "layout", "geometries", "phase", "shared bytes", "code for")
    archs: dict[Any, list[str]] = {}
    for one in libraries:
        for info in one.kernels:
            archs.setdefault(info, []).extend(one.archs)
    for info, names in archs.items():
        pairs = " ".join(f"{latent}/{rope}" for latent, rope in info.geometries)
        row = (info.name, info.op, info.dtype, info.layout, pairs, str(info.phase), str(info.shared_bytes))
        table.add_row(*row, " ".join(names))
    _console().print(table)
    return 0


def _status(options: argparse.Namespace) -> int:
    """Which phase is proven where, for the sources of this checkout."""
    rows = evidence.statuses(evidence.checkout())
    unmet = evidence.unmet(rows, options.require)
    if options.json:
        _print_json(evidence.as_json(rows) | {"unmet": unmet})
    else:
        table = Table("phase", "place", "status", "why", "worst row relL2", "least margin ratio", "date")
        for row in rows:
            error = "" if row.worst_row_rel_l2 is None else f"{row.worst_row_rel_l2:.2g}"
            ratio = "" if row.min_margin_ratio is None else f"{row.min_margin_ratio:.3g}"
            word = f"[{_STYLES[row.word]}]{row.word}[/]"
            table.add_row(row.phase, row.place, word, row.why, error, ratio, row.created or "")
        _console().print(table)
    for requirement in unmet:
        phase, _, place = requirement.partition("@")
        print(f"kdtree-engine: {phase} is not proven on {place}; run `nox -s {phase}` there", file=sys.stderr)
    return 1 if unmet else 0


def _show(options: argparse.Namespace) -> int:
    """Axes, types, sizes, provenance, the trees and their margins. The file is checked whole first."""
    read = bundle.read(options.file)
    if options.json:
        _print_json(summary(read))
    else:
        show(read, _console())
    return 0


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def _console() -> Console:
    """Standard output; wide where it is a file or a pipe, since nobody wraps there."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
