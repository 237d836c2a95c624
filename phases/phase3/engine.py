"""A whole sglang.Engine with the trained tiny model: python -m phases.phase3.engine OUT.json ARGUMENTS.json

Runs in a process of its own, and its processes' processes: what an import needs stands in through a sitecustomize that
`environment` puts on the path, beside the entry point by which SGLang finds the backend.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

from kdtree_engine.decode import read_weights
from phases.conftest import ROOT

if TYPE_CHECKING:
    from phases.places import Place

TINY = ROOT / "fixtures" / "tiny_model"
PROMPTS = [b"def ", b"import ", b"def "]
COUNT = 12
_SITE = """
import os
if os.environ.get("KDTREE_STAND_INS"):
    from phases.phase3 import stand_ins
    stand_ins.install()
    stand_ins.engine()
"""
_ENTRY_POINTS = """[sglang.srt.plugins]
kdtree_engine = kdtree_engine.sglang_backend:register
stand_ins = phases.phase3.stand_ins:round_without_cuda
"""


def checkpoint(folder: Path, architecture: str = "DeepseekV3ForCausalLM") -> Path:
    """The tiny model as SGLang's loader takes it: the head by itself, and DeepSeek's yarn, here of factor 1.

    A draft model goes by the architecture of DeepSeek V2, which is the same here: one of V3 would be taken for a layer
    of multi-token prediction.
    """
    weights, config = read_weights(TINY, "target.safetensors", "config.json")
    weights = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    config |= {
        "architectures": [architecture],
        "tie_word_embeddings": False,
        "moe_layer_freq": 1,
        "rope_theta": 10000.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn",
            "factor": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    }
    config.pop("rope_parameters", None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """Of a process that may run an engine; `folder` gets what has to be on its path."""
    (folder / "kdtree_engine-0.dist-info").mkdir(parents=True, exist_ok=True)
    (folder / "kdtree_engine-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kdtree-engine\nVersion: 0\n"
    )
    (folder / "kdtree_engine-0.dist-info" / "entry_points.txt").write_text(_ENTRY_POINTS)
    (folder / "sitecustomize.py").write_text(_SITE)
    path = [str(folder), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "KDTREE_STAND_INS": "1", **changes}


def arguments(folder: Path, device: str) -> dict[str, Any]:
    """Of a plain engine; one small batch, and nothing cached between requests."""
    return {
        "model_path": str(checkpoint(folder / "model")),
        "device": device,
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 2048,
        "max_running_requests": 4,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "context_length": 512,
        "random_seed": 1,
    }


def speculative(folder: Path) -> dict[str, Any]:
    """Trees of six nodes, two wide, drafted by the model itself, so that about half of what it drafts is accepted."""
    return {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(checkpoint(folder / "draft", "DeepseekV2ForCausalLM")),
        "speculative_draft_attention_backend": "triton",
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 6,
    }


def run(
    place: Place, folder: Path, extra: dict[str, Any], variables: dict[str, str] | None = None, *, at_once: bool = False
) -> dict[str, Any]:
    """What an engine says of its prompts, in a process of its own; one after the other, or all in one batch."""
    device = "cuda" if place.kind == "cuda" else "cpu"
    given = arguments(folder, device) | extra
    given = {"prompts": [list(prompt) for prompt in PROMPTS], "max_tokens": COUNT, "again": 0} | given
    given["at_once"] = at_once
    (folder / "arguments.json").write_text(json.dumps(given))
    if device == "cpu":
        # The draft model's first step would compile for a minute.
        variables = (variables or {}) | {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "phases.phase3.engine"]
    command += [str(folder / "found.json"), str(folder / "arguments.json")]
    surroundings = environment(folder / "site", **(variables or {}))
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert (folder / "found.json").exists(), done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def with_graphs() -> dict[str, Any]:
    """Verify steps of up to four requests in one CUDA graph, padded to four."""
    return {"disable_cuda_graph": False, "cuda_graph_bs_decode": [4], "cuda_graph_backend_prefill": "disabled"}


def main() -> None:
    """Starts an engine, generates, once and then `again` times for the clock, and writes tokens and times."""
    import sglang

    out, arguments = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    names = ("prompts", "max_tokens", "at_once", "again")
    prompts, count, at_once, again = (arguments.pop(name) for name in names)
    began = time.perf_counter()
    engine = sglang.Engine(**arguments)
    start_s = time.perf_counter() - began
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}

    def generate() -> list[dict[str, Any]]:
        if at_once:
            return list(engine.generate(input_ids=prompts, sampling_params=sampling))
        return [engine.generate(input_ids=prompt, sampling_params=sampling) for prompt in prompts]

    results = generate()
    seconds = []
    for _ in range(again):
        began = time.perf_counter()
        generate()
        seconds.append(time.perf_counter() - began)
    found = {
        "tokens": [result["output_ids"] for result in results],
        "meta": [result["meta_info"] for result in results],
        "start_s": start_s,
        "seconds": seconds,
    }
    out.write_text(json.dumps(found, default=str))
    engine.shutdown()


if __name__ == "__main__":
    main()
