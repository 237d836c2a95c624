"""What can be wrong with one request of a batch, in words."""

from __future__ import annotations

import enum


class RequestStatus(enum.IntFlag):
    """A request's status word, kdtree_request_status of kdtree/capi.h; 0 is good."""

    NOT_A_NUMBER = 1
    RISING = 2
    REPEATED_TOKEN = 4
    SIZE_OUT_OF_RANGE = 8
    BAD_TREE = 16
    PATH_TOO_LONG = 32
    BAD_PATH = 64
    BAD_SLOT = 128

    def describe(self) -> str:
        """The flags in words, "good" for none."""
        return "; ".join(_WORDS[flag] for flag in RequestStatus if flag in self) or "good"


_WORDS = {
    RequestStatus.NOT_A_NUMBER: "a log-probability is NaN or +inf, a logit NaN, or a uniform outside [0, 1)",
    RequestStatus.RISING: "log-probabilities of a depth rise",
    RequestStatus.REPEATED_TOKEN: "a depth names a token twice",
    RequestStatus.SIZE_OUT_OF_RANGE: "a size is outside the call's capacities",
    RequestStatus.BAD_TREE: "a parent or link is out of range, cyclic, or not before its child",
    RequestStatus.PATH_TOO_LONG: "the accepted path is longer than max_path",
    RequestStatus.BAD_PATH: "the path does not rise, or leaves the request's nodes",
    RequestStatus.BAD_SLOT: "a node's slot is outside the pool",
}
