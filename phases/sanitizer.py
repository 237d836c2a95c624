"""Runs a module under NVIDIA's compute-sanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck")


def summary(tool: str, module: str, *options: str) -> str:
    """The tool's last word on `python -m module` with `options`; any finding fails.

    The module prints how many calls it made. Each tensor is an allocation of its own, so that bounds are exact.
    """
    program = shutil.which("compute-sanitizer")
    assert program is not None, "compute-sanitizer is not on PATH; install the CUDA toolkit's or add its folder"
    command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", module, *options]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    report = result.stdout + result.stderr
    assert result.returncode == 0, report[-4000:]
    assert re.search(r"[1-9]\d* calls", report), "nothing ran under the sanitizer"
    found = re.search(r"(ERROR|RACECHECK) SUMMARY: .*", report)
    assert found is not None, report[-4000:]
    return found[0]
