"""The errors this package raises on purpose. Each message is one line that says what to do next."""

from __future__ import annotations


class KdtreeError(Exception):
    """Base of every error raised on purpose."""


class _ArgumentError(KdtreeError, ValueError):
    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument

    def __reduce__(self) -> tuple[type[_ArgumentError], tuple[str, str]]:
        # Exceptions cross process borders (pytest-xdist, multiprocessing) by their constructor's arguments.
        return type(self), (self.argument, str(self).removeprefix(f"{self.argument}: "))


class KernelError(_ArgumentError):
    """A kernel refused an argument, or could not run. `argument` names the culprit."""


class BundleError(_ArgumentError):
    """A bundle is damaged, of a newer format, or impossible. `argument` names the dataset or attribute."""


class DecodeError(_ArgumentError):
    """Decoding cannot go on: a setting, a model or a request is not possible. `argument` names the culprit."""


class ToolchainError(KdtreeError):
    """A compiler or tool is missing or broken; the message says what to install."""
