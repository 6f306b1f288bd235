"""A shorter interpreter switch interval while a background thread works.

NumPy releases the interpreter lock for every block and waits to get it back. A thread that computes in Python holds it
for 5 ms by default, hundreds of times longer than a block takes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

_SWITCH_INTERVAL = 2e-4
_lock = threading.Lock()
_users = 0
_before = 0.0


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Shorten the switch interval of the process until the last of those that are in here has left."""
    global _users, _before
    with _lock:
        if _users == 0:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_SWITCH_INTERVAL, _before))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                sys.setswitchinterval(_before)
