"""Phase 3: a server as the guide starts it, with a kernel that takes over, figures on its endpoint, and a capture."""

from __future__ import annotations

import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from kdtree_engine import bundle as bundles
from kdtree_engine.ops.verify_attn_paged import LSE_ABS, OUT_ROW_REL_L2
from phases import exactness
from phases.conftest import ROOT
from phases.phase2.test_parity import call
from phases.phase3 import engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from phases.places import Place

    Evidence = Callable[..., None]

GUIDE = ROOT / "docs" / "sglang.md"
START_S = 300


def guide_command() -> list[str]:
    """The options of the guide's server, without its dots."""
    (line,) = re.findall(r"python -m sglang\.launch_server \.\.\. (.*)", GUIDE.read_text())
    return shlex.split(line)


def options(arguments: dict[str, Any]) -> list[str]:
    """Arguments of an engine as those of a command."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def fetch(url: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def wait(server: subprocess.Popen[str], url: str, log: Path) -> None:
    """Until it answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and server.poll() is None:
        try:
            fetch(f"{url}/model_info")
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(1)
    raise AssertionError(f"the server does not answer, status {server.poll()}\n{log.read_text()[-6000:]}")


def test_the_guides_server(place: Place, tmp_path: Path, evidence: Evidence) -> None:
    """Auto: shadow at first, then our kernel; counters on /metrics; two steps kept as bundles."""
    on_gpu = place.kind == "cuda"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = engine.arguments(tmp_path, "cuda" if on_gpu else "cpu") | engine.speculative(tmp_path)
    for given in ("attention_backend", "speculative_draft_attention_backend"):
        del arguments[given]  # the guide gives them
    arguments |= {"enable_metrics": True, "port": port, "host": "127.0.0.1", "skip_server_warmup": True}
    variables = {
        "KDTREE_ENGINE_MODE": "auto",
        "KDTREE_ENGINE_AUTO_CALLS": "3",
        "KDTREE_ENGINE_PARITY_LOG": str(tmp_path / "parity.jsonl"),
        "KDTREE_ENGINE_CAPTURE": str(tmp_path / "captured"),
        "KDTREE_ENGINE_CAPTURE_EVERY": "3",
        "KDTREE_ENGINE_CAPTURE_LAYERS": "0,1",
        "KDTREE_ENGINE_CAPTURE_COUNT": "2",
    }
    if not on_gpu:
        variables |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", *options(arguments), *guide_command()]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "server.log").open("w") as log:
        environment = engine.environment(tmp_path / "site", **variables)
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
        try:
            wait(server, url, tmp_path / "server.log")
            sampling = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}
            said = json.loads(fetch(f"{url}/generate", {"input_ids": list(b"def "), "sampling_params": sampling}))
            metrics = fetch(f"{url}/metrics")
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()
    text = (tmp_path / "server.log").read_text()
    assert len(said["output_ids"]) == 60, text[-4000:]
    events: dict[str, float] = {}
    for event, value in re.findall(r'^kdtree_engine:verify_events_total\{event="([^"]*)".*\} (\S+)$', metrics, re.M):
        events[event] = events.get(event, 0) + float(value)
    assert events["verify calls"] > 10
    assert events["compared"] >= 6
    assert events["served by kdtree-engine"] > 0
    assert events["served by kdtree-engine"] + events["served by SGLang"] == events["verify calls"]
    assert not [event for event in events if event.startswith(("fallback", "breaches", "errors"))]
    assert re.search(r"^kdtree_engine:serving\{.*\} 1\.0$", metrics, re.M)
    paths = bundles.find(tmp_path / "captured")
    found = [exactness.with_outputs(bundles.read(path)) for path in paths]
    assert sorted(bundle.provenance["layer"] for bundle in found) == [0, 1]
    for bundle in found:
        attend = exactness.dense_attend(bundle, call(place, "verify_attn_flash_paged", bundle))
        failures, _ = exactness.numeric(bundle, attend, OUT_ROW_REL_L2, LSE_ABS)
        assert not failures
    evidence(events=events, bundles=[path.stat().st_size for path in paths])
