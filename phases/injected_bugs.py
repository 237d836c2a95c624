"""Bugs put into a copy of a kernel's source, each to be caught by the tool named for it.

A pattern that no longer occurs exactly once fails its test, so that a list of bugs follows its kernel. "race" and
"asan" run that variant of the host build; "numbers" compares with the oracle.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kdtree_engine import KernelError
from phases import host_build

if TYPE_CHECKING:
    from collections.abc import Callable


# A quarter of the geometries compiles in a quarter of the time.
USUAL_GEOMETRY = """namespace kdtree {
template <class Args, class Launch>
int usual_geometry(const Args&, Launch launch) {
  return launch(IntC<512>(), IntC<64>());
}
"""


@dataclass(frozen=True)
class Bug:
    """A substitution in a kernel's source and the tool that must notice it."""

    name: str
    tool: Literal["race", "asan", "numbers"]
    find: str
    replace: str

    def __str__(self) -> str:
        return f"{self.name}-{self.tool}"

    @property
    def variant(self) -> host_build.Variant:
        return "plain" if self.tool == "numbers" else self.tool


def run(
    gate: str, source: Path, bug: Bug | None, variant: host_build.Variant, folder: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    """The check of module `gate`, which calls `judge`, on a library with the bug, in a process of its own.

    The module gets the library and `options` on its command line.
    """
    sources = [_usual(path, host_build.BUILD / "usual") for path in host_build.sources() if path != source]
    library = host_build.library([_usual(source, folder, bug), *sources], variant)
    command = [sys.executable, "-m", gate, str(library), *options]
    environment = host_build.asan_environment(os.environ) if variant == "asan" else dict(os.environ)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _usual(source: Path, folder: Path, bug: Bug | None = None) -> Path:
    """The source with the bug and without the geometries that are not needed, in `folder`."""
    text = source.read_text()
    if bug is not None:
        count = text.count(bug.find)
        assert count == 1, f"{bug.name}: its pattern occurs {count} times in {source.name}"
        text = text.replace(bug.find, bug.replace)
    if "with_geometry(" in text:
        text = text.replace("with_geometry(", "usual_geometry(").replace("namespace kdtree {", USUAL_GEOMETRY, 1)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{source.name}.{os.getpid()}"  # workers write the same at the same time
    unfinished.write_text(text)
    return unfinished.replace(folder / source.name)


def judge(is_right: Callable[[Path], bool]) -> int:
    """Exit code for the library that the command line names: 0 right, 2 wrong, 3 refused with the runtime's line.

    The sanitizers end the process with 1, or a signal does.
    """
    try:
        return 0 if is_right(Path(sys.argv[1])) else 2
    except KernelError as error:
        print(error, file=sys.stderr)
        return 3


def assert_caught(bug: Bug, source: Path, result: subprocess.CompletedProcess[str]) -> None:
    """The bug's own tool has noticed it, and said where."""
    if bug.tool == "numbers":
        assert result.returncode == 2, result.stderr[-4000:]
    elif bug.tool == "race":
        assert result.returncode == 3, result.stderr[-4000:]
        assert source.name in result.stderr, "the report names no source line"
    else:
        assert result.returncode not in (0, 2), "nothing noticed"
        reports = ("may not be accessed", "AddressSanitizer", "runtime error: ")
        assert any(report in result.stderr for report in reports), result.stderr[-4000:]
