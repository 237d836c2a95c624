"""What can be wrong with one request of a batch, as kdtree/capi.h numbers it."""

from __future__ import annotations

import enum


class RequestStatus(enum.IntFlag):
    """kdtree_request_status; 0 is good."""

    NOT_A_NUMBER = 1
    RISING = 2
    REPEATED_TOKEN = 4
    SIZE_OUT_OF_RANGE = 8
    BAD_TREE = 16
    PATH_TOO_LONG = 32
    BAD_PATH = 64
    BAD_SLOT = 128
