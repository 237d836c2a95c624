"""Tokens a second of a whole SGLang engine on this machine's GPU: python -m benchmarks.sglang_engine

The trained tiny model, trees of six nodes drafted by itself, CUDA graphs, one request with a prompt of `--prompt`
tokens: by SGLang's kernel, and by ours, which serves. Two layers of attention are a small part of such an engine's
step, so the figure says whether our kernel slows serving down, not what it brings to a large model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from kdtree_engine import __version__, evidence
from phases.phase3 import engine
from phases.places import Place


def measure(name: str, prompt: int, tokens: int, again: int) -> dict[str, Any]:
    """Tokens a second with one backend."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        extra = engine.speculative(folder) | engine.with_graphs()
        extra |= {"context_length": prompt + tokens + 64, "max_total_tokens": 4 * (prompt + tokens + 64)}
        text = (engine.TINY.parent.parent / "src/kdtree_engine/capture.py").read_bytes()
        extra |= {"prompts": [list(text[:prompt])], "max_tokens": tokens, "again": again}
        variables = {}
        if name != "triton":
            extra["attention_backend"] = name
            variables = {"KDTREE_ENGINE_MODE": "serve", "KDTREE_ENGINE_SAMPLE": "0"}
        found = engine.run(Place("cuda"), folder, extra, variables)
    (meta,) = found["meta"]
    return {
        "tokens_per_s": round(tokens / statistics.median(found["seconds"]), 2),
        "seconds": [round(second, 4) for second in found["seconds"]],
        "accept_length": meta["spec_accept_length"],
        "tokens": found["tokens"][0],
    }


def main() -> int:
    """Run the command; 0 when both engines say the same."""
    parser = argparse.ArgumentParser(prog="sglang_engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--again", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times SGLang on a GPU", file=sys.stderr)
        return 1
    import sglang

    found = {
        name: measure(name, arguments.prompt, arguments.tokens, arguments.again) for name in ("triton", "kdtree_mla")
    }
    texts = [figures.pop("tokens") for figures in found.values()]
    for name, figures in found.items():
        print(f"{name:>10}: {figures['tokens_per_s']} tokens/s, {figures['accept_length']:.2f} a verify step")
    record = {
        "schema": 1,
        "created": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "kernels": evidence.digests(evidence.checkout(Path(__file__).parent), "phase3", "cuda")["kernels"],
        "versions": {"kdtree_engine": __version__, "sglang": sglang.__version__, "torch": torch.__version__},
        "shape": {"prompt": arguments.prompt, "tokens": arguments.tokens, "model": "tiny_model"},
        "same_text": texts[0] == texts[1],
        "engines": found,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if record["same_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
