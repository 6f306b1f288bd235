"""Where the threads of this process are."""

from __future__ import annotations

import gc
import os
import sys
import threading
from types import FrameType

from collectives.base.exclusion import exclusively

_pausing = threading.RLock()
# A child that is forked meanwhile would find it held by a thread that it does not have, and its collector off.
os.register_at_fork(before=_pausing.acquire, after_in_parent=_pausing.release, after_in_child=_pausing.release)


def current_frames() -> dict[int, FrameType]:
    """The topmost frame of each thread, by its identifier.

    No garbage is collected meanwhile: before Python 3.11.9 and 3.12 a collection that frees a thread's local data there
    waits for a lock that its own thread holds, and the process stops for ever (python/cpython#106883).
    """
    return exclusively(_pausing, _frames_without_collection)


def _frames_without_collection() -> dict[int, FrameType]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
