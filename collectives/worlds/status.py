"""A rank says twice a second where it is: which line of the program, what it waits for, and for whom.

``collectivesrun`` names the pipe that takes these lines of JSON (`collectives.launch.status` reads them). A thread of
its own writes them, so that no call becomes slower. A rank that is stopped, or in C code that keeps the interpreter's
lock, says nothing, which shows as well.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from collectives.engine.handles import PACKAGE
from collectives.worlds.world import World

VARIABLE = "COLLECTIVES_STATUS"
"""The variable by which ``collectivesrun`` names where the lines go."""
_EVERY = 0.5
"""Seconds between two lines."""
_MOST_TEXT = 500
"""Most characters of a name or a line of the program, so that a line of JSON fits into one write."""
_OWN = PACKAGE + os.sep
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")


def start(path: str, present: Callable[[], tuple[World | None, int | None]]) -> threading.Thread:
    """Start the thread; it ends with the process.

    Args:
        present: returns the default world, if there is one, and the generation of an elastic job.
    """
    thread = threading.Thread(target=_tell, args=(path, present), name="collectives status", daemon=True)
    thread.start()
    return thread


def _tell(path: str, present: Callable[[], tuple[World | None, int | None]]) -> None:
    host, changed, before = socket.gethostname(), time.monotonic(), None
    while True:
        where, call = place_of(sys._current_frames().get(threading.main_thread().ident or 0))
        line = {"host": host, "pid": os.getpid(), "at": where[-_MOST_TEXT:], "call": call}
        try:
            line |= _of_world(*present())
        except Exception:  # what another thread is about to change or to end; the next line has it
            line["rank"] = None
        now = time.monotonic()
        if before != (before := (where, line.get("operations"), line.get("rank"))):
            changed = now
        line["still"] = round(now - changed, 2)
        try:
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            try:
                os.write(file, json.dumps(line).encode() + b"\n")
            finally:
                os.close(file)
        except BlockingIOError:
            pass  # the launcher is stopped
        except OSError:
            return
        time.sleep(_EVERY)


def _of_world(world: World | None, generation: int | None) -> dict[str, Any]:
    """What a line says of the world."""
    if world is None:
        return {"rank": None}
    now = time.monotonic()
    waits = max(world.waits(), key=lambda wait: now - (wait.since or now), default=None)
    return {
        "rank": world.rank,
        "generation": generation,
        "operations": world.operations_done,
        "waits": waits
        and {
            "what": waits.what[:_MOST_TEXT],
            "at": waits.where[-_MOST_TEXT:],
            "seconds": None if waits.since is None else round(now - waits.since, 2),
            "ranks": waits.ranks[:32],
        },
    }


def place_of(frame: FrameType | None) -> tuple[str, str]:
    """Where a thread is: the line of the program, such as ``train.py:12 in step``, and the function of this package
    that it calls there, or an empty text.

    The program is what is neither this package, nor Python's library, nor installed; or, where there is none of it on
    the stack, the innermost of what is installed.
    """
    call = installed = ""
    while frame is not None:
        code = frame.f_code
        path = code.co_filename
        if path.startswith(_OWN):
            call = code.co_name
        else:
            line = f"{path}:{frame.f_lineno} in {code.co_name}"
            if not (path.startswith(_LIBRARIES) or "site-packages" in path or "dist-packages" in path):
                return line, call
            installed = installed or line
        frame = frame.f_back
    return installed, call
