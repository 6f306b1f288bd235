"""A rank says twice a second where it is: which line of the program, what it waits for, and for whom.

Under ``collectivesrun`` these lines of JSON go into a pipe that it has named, and in ranks that another launcher has
started each into a file of the user's, in place of the one before (`collectives.launch.status` reads both). The rank
holds a lock on its file, which the kernel releases when the process ends, however it does. A thread of its own writes
the lines, so that no call becomes slower. A rank that is stopped, or in C code that keeps the interpreter's lock, says
nothing, which shows as well.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from collectives.base import launchers
from collectives.base.frames import current_frames
from collectives.base.user_folder import OF_RANKS, user_folder
from collectives.engine.handles import PACKAGE
from collectives.transport.stores.rendezvous import NOTHING, Asked
from collectives.worlds.world import World

VARIABLE = "COLLECTIVES_STATUS"
"""The variable by which ``collectivesrun`` names where the lines go; 0: nowhere."""
_EVERY = 0.5
"""Seconds between two lines."""
_KEPT = 20
"""Lines over which the rate of steps is taken."""
_MOST_TEXT = 500
"""Most characters of a name or a line of the program, so that a line of JSON fits into one write."""
_OWN = PACKAGE + os.sep
_LIBRARIES = (sysconfig.get_path("stdlib") + os.sep, "<frozen ")
_MEET = (
    ("COLLECTIVES_RENDEZVOUS",),
    ("PMIX_NAMESPACE",),
    ("MASTER_ADDR", "MASTER_PORT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
"""Variables that are alike in the ranks of one job."""
_held: dict[int, Path] = {}
"""The files of this process, by the descriptors that hold their locks: one, and at times that of a former job."""


def start(
    path: str, present: Callable[[], tuple[World | None, int | None]], asked: Asked = NOTHING
) -> threading.Thread | None:
    """Start the thread; it ends with the process, when nobody can read the lines any more or, if they go into a file,
    after a `shutdown`: Ray's and Dask's processes are ranks of other jobs later.

    Args:
        path: of the pipe; empty: a file of its own. Where that cannot be made, no thread is started.
        present: returns the default world, if there is one, and the generation of an elastic job.
        asked: what the program has told `init`.
    """
    about: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "began": time.time(), "rank": None}
    own = -1
    if not path:
        try:
            own = _make_file()
        except OSError:
            return None
        path, about["job"] = str(_held[own]), ""
        about["rank"] = launchers.rank(os.environ) if asked.rank is None else asked.rank
    thread = threading.Thread(
        target=_tell, args=(path, own, present, about, asked.rendezvous), name="collectives status", daemon=True
    )
    thread.start()
    return thread


def _make_file() -> int:
    """Make this rank's file, locked already when it gets its name: readers remove one that is not. Returns the
    descriptor that holds the lock."""
    path = user_folder() / f"{OF_RANKS}{os.getpid()}"
    new = path.with_name(f"new-{path.name}")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    _held[file] = new
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path)
    except OSError:
        _remove(file)
        raise
    _held[file] = path
    return file


def _remove(file: int) -> None:
    """Remove a file, unless it is gone, or the next job's has its name."""
    path = _held.pop(file, None)
    if path is not None:
        with suppress(OSError):
            if os.path.samestat(os.fstat(file), path.stat()):
                path.unlink()
        os.close(file)


@atexit.register
def _remove_all() -> None:
    for file in list(_held):
        _remove(file)


def _release() -> None:
    """In a forked child, give up its part in the parent's lock."""
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_release)


def _job() -> str:
    """What is alike in the ranks of one job on this host, and in no other's: where they meet, or who started them."""
    told = [[os.environ.get(name, "") for name in names] for names in _MEET]
    return next((" ".join(texts) for texts in told if all(texts)), f"process {os.getppid()}")


def _tell(
    path: str,
    own: int,
    present: Callable[[], tuple[World | None, int | None]],
    about: dict[str, Any],
    rendezvous: str | None,
) -> None:
    changed, before, joined = time.monotonic(), None, False
    counts: deque[tuple[float, int]] = deque(maxlen=_KEPT)
    while True:
        if "job" in about:
            about["job"] = rendezvous or _job()
        where, call = place_of(current_frames().get(threading.main_thread().ident or 0))
        line = {**about, "at": where[-_MOST_TEXT:], "call": call}
        with suppress(Exception):  # what another thread is about to change or to end; the next line has it
            world, generation = present()
            if "job" in about and joined and (world, generation) == (None, None):
                return _remove(own)
            joined = joined or world is not None
            line |= _of_world(world, generation)
        world = None  # one that ends meanwhile is not kept
        now = time.monotonic()
        if before != (before := (where, line.get("operations"), line["rank"])):
            changed = now
        if counts and counts[-1][1] > line.get("steps", 0):
            counts.clear()  # another world
        counts.append((now, line.get("steps", 0)))
        (first, earlier), (last, later) = counts[0], counts[-1]
        line["rate"] = round((later - earlier) / (last - first), 2) if last > first else 0.0
        line["still"] = round(now - changed, 2)
        try:
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(file, json.dumps(line).encode() + b"\n")  # of a longer one before, the end is left in a file
            finally:
                os.close(file)
        except BlockingIOError:
            pass  # the launcher is stopped
        except OSError:
            return _remove(own)
        time.sleep(_EVERY)


def _of_world(world: World | None, generation: int | None) -> dict[str, Any]:
    """What a line says of the world."""
    if world is None:
        return {}
    now = time.monotonic()
    waits = max(world.waits(), key=lambda wait: now - (wait.since or now), default=None)
    operations, steps = world.work_done
    return {
        "rank": world.rank,
        "generation": generation,
        "operations": operations,
        "steps": steps,
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
