"""`kdtree-engine generate`: decodes a text by draft trees as it is watched, and says whether plain decoding agrees."""

from __future__ import annotations

import codecs
import json
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from kdtree_engine.decode import Decoder, DflashDrafter, MlaModel, NgramDrafter, Round, arrays_for, read_weights
from kdtree_engine.errors import DecodeError, KdtreeError
from kdtree_engine.evidence import checkout

if TYPE_CHECKING:
    import argparse

    from kdtree_engine.decode import Arrays, Drafter

# What the n-gram drafter reads where it is given nothing: there with every Python.
_MODULES = (
    "argparse",
    "ast",
    "difflib",
    "inspect",
    "optparse",
    "pickle",
    "subprocess",
    "tarfile",
    "threading",
    "zipfile",
)


def add_parser(commands: Any) -> Any:
    """Adds the command to argparse's subparsers."""
    parser = commands.add_parser(
        "generate", help="decode a text by draft trees with the tiny model", description=generate.__doc__
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text that is continued, as bytes of UTF-8")
    parser.add_argument("--drafter", choices=["dflash", "ngram"], default="dflash", help="default: %(default)s")
    parser.add_argument("--tree-budget", type=int, default=16, metavar="N", help="nodes below the root, 0..255 (16)")
    parser.add_argument("--width", type=int, default=16, metavar="N", help="candidates a depth, 1..64 (16)")
    parser.add_argument("--chain", action="store_true", help="chains instead of trees: a width of 1")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="tokens to add (96)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of drawn tokens (0)")
    parser.add_argument("--device", choices=["host", "cuda"], default="host", help="default: %(default)s")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the checkout's fixtures/tiny_model")
    parser.add_argument(
        "--text", type=Path, action="append", metavar="FILE", help="what the n-gram drafter reads; may be repeated"
    )
    parser.add_argument("--show-tree", action="store_true", help="draw each round's tree with the accepted path")
    parser.add_argument("--no-check", action="store_true", help="do not decode plainly for comparison")
    parser.set_defaults(run=generate)
    return parser


@dataclass
class _Run:
    """A decoded text and how it came about."""

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, done: Round) -> None:
        self.tokens += done.new
        self.margins += done.margins
        if done.number:
            self.rounds.append(done)

    @property
    def mean_accepted(self) -> float:
        """Tokens a round, the target's own included."""
        return sum(len(done.path) for done in self.rounds) / max(1, len(self.rounds))

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / max(self.seconds, 1e-9)


def generate(options: argparse.Namespace) -> int:
    """Continue a text with the tiny model: a drafter's trees, verified and accepted by the kernels.

    Ends with rounds, mean accepted length, tokens a second, and whether plain decoding gives the same text; exit status
    1 when it does not although its choice was clear.
    """
    arrays = arrays_for(options.device)
    model, drafter = _load(options, arrays)
    prompt = list(options.prompt.encode(errors="surrogateescape"))
    settings = {"temperature": options.temperature, "seed": options.seed}
    width = 1 if options.chain else options.width
    decoder = Decoder(model, drafter, budget=options.tree_budget, width=width, **settings)
    console = Console(highlight=False, soft_wrap=True)
    run = _decode(decoder, prompt, options, None if options.json else console)
    plain = None
    if not options.no_check:
        with Console(stderr=True).status("decoding plainly for comparison"):
            plain = _decode(Decoder(model, **settings), prompt, options, None)
    verdict, agrees = _verdict(run, plain, decoder.undecided)
    if options.json:
        print(json.dumps(_as_json(options, run, plain, verdict), indent=1))
    else:
        console.print(
            f"\n[bold]{len(run.rounds)} rounds, mean accepted length {run.mean_accepted:.2f}, "
            f"{run.tokens_per_second:.1f} tokens/s[/bold]"
        )
        if plain is not None:
            console.print(f"plain decoding: {plain.tokens_per_second:.1f} tokens/s; {verdict}")
    return 0 if agrees else 1


def _load(options: argparse.Namespace, arrays: Arrays) -> tuple[MlaModel, Drafter]:
    folder = options.model
    if folder is None:
        try:
            folder = checkout() / "fixtures" / "tiny_model"
        except KdtreeError:
            raise DecodeError(
                "model", "not in a checkout, which has one in fixtures/tiny_model; pass --model"
            ) from None
    model = MlaModel(*read_weights(folder, "target.safetensors", "config.json"), arrays)
    if options.drafter == "dflash":
        return model, DflashDrafter(*read_weights(folder, "drafter.safetensors", "drafter.json"), arrays)
    library = Path(sysconfig.get_path("stdlib"))
    files = options.text or [path for path in (library / f"{name}.py" for name in _MODULES) if path.is_file()]
    try:
        text = b"\0".join(path.read_bytes() for path in files)
    except OSError as error:
        raise DecodeError(
            "text", f"cannot read {error.filename}: {error.strerror}; pass a file that is there"
        ) from None
    return model, NgramDrafter(text, model.vocab_size, arrays)


def _decode(decoder: Decoder, prompt: list[int], options: argparse.Namespace, console: Console | None) -> _Run:
    """Decodes, to be watched where there is a console."""
    run, watch = _Run(), _Watch(console, prompt, trees=options.show_tree) if console is not None else None
    began = time.perf_counter()
    for done in decoder.generate([prompt], options.max_tokens):
        run.seconds = time.perf_counter() - began
        run.add(done)
        if watch is not None:
            watch.show(done)
    return run


class _Watch:
    """Prints a text as it grows, or each round's tree and what it added."""

    def __init__(self, console: Console, prompt: list[int], *, trees: bool) -> None:
        self._console, self._trees = console, trees
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._write(prompt)

    def _write(self, tokens: list[int]) -> None:
        text = self._decoder.decode(bytes(token for token in tokens if token < 256))
        # A model may say anything; a terminal should not obey.
        shown = "".join(c if c in "\n\t" or c.isprintable() else "\ufffd" for c in text)
        if not self._trees:
            sys.stdout.write(shown)
            sys.stdout.flush()
        elif shown:
            self._console.print(f"+ {escape(repr(shown))}")

    def show(self, done: Round) -> None:
        if self._trees and done.number:
            self._console.print(drawing(done))
        self._write(done.new)


def drawing(done: Round) -> Tree:
    """The round's tree; accepted nodes are bold and starred, and the target's own token stands behind the last."""
    path = set(done.path)

    def label(node: int) -> str:
        text = escape(_token(done.tokens[node]))
        return f"[bold green]* {text}[/bold green]" if node in path else text

    title = f"round {done.number}: {len(done.tokens)} nodes, accepted {len(done.path) - 1}"
    tree = Tree(title)
    branches = [tree.add(label(0))]
    for node in range(1, len(done.tokens)):
        branches.append(branches[done.parents[node]].add(label(node)))
    if len(done.new) == len(done.path):
        branches[done.path[-1]].add(f"[bold]> {escape(_token(done.new[-1]))}[/bold]")
    return tree


def _token(token: int) -> str:
    return repr(bytes([token]))[1:] if token < 256 else f"<{token}>"


def _verdict(run: _Run, plain: _Run | None, undecided: float) -> tuple[str, bool]:
    """Whether the texts are equal, in words, and whether that is as it should be."""
    if plain is None:
        return "not compared", True
    pairs = zip(run.tokens, plain.tokens, strict=True)
    first = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if first is None:
        return "its text is the same", True
    margin = plain.margins[first]
    clear = "clear" if margin > undecided else "open to rounding"
    words = (
        f"its text differs from token {first} on, where its choice was {clear} (margin {margin:.2g}, {undecided:.2g})"
    )
    return words, margin <= undecided


def _as_json(options: argparse.Namespace, run: _Run, plain: _Run | None, verdict: str) -> dict[str, Any]:
    text = bytes(token for token in run.tokens if token < 256).decode(errors="replace")
    return {
        "schema": 1,
        "prompt": options.prompt,
        "text": text,
        "tokens": run.tokens,
        "device": options.device,
        "drafter": options.drafter,
        "rounds": len(run.rounds),
        "mean_accepted_length": run.mean_accepted,
        "tokens_per_second": run.tokens_per_second,
        "plain_tokens_per_second": None if plain is None else plain.tokens_per_second,
        "equals_plain": None if plain is None else run.tokens == plain.tokens,
        "verdict": verdict,
        "trees": [asdict(done) for done in run.rounds] if options.show_tree else None,
    }
