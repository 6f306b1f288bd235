"""Where the threads of this process are."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_pausing = threading.RLock()


def current_frames() -> dict[int, FrameType]:
    """The topmost frame of each thread, by its identifier.

    No garbage is collected meanwhile: before Python 3.11.9 and 3.12 a collection that frees a thread's local data there
    waits for a lock that its own thread holds, and the process stops for ever (python/cpython#106883).
    """
    with _pausing:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()
