"""Shared memory that MPI leaves behind when ranks die: some MB in ``/dev/shm`` each time.

A file is taken for the job's own leftover if it is named as MPICH or Open MPI name theirs on this host, belongs to this
user, was last changed after the job began, and no process has it mapped or open, at two looks. The files of another job
that runs are mapped by its ranks. Where these may be hidden from this process, nothing is touched: in any container,
because its ``/dev/shm`` may be that of another container, and beside a process of this user that has shared memory but
may not be looked into.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PROCESSES = Path("/proc")
_BETWEEN = 0.05
_INITIAL_PID_NAMESPACE = 4026531836
"""Its number (Linux). Processes in it see those of all other namespaces."""
_NO_SHARED_MEMORY = re.compile(r"^RssShmem:\s+0 kB$", re.MULTILINE)


def sweep(began: float, folder: Path = _FOLDER) -> None:
    """Remove what a job that began then, and has ended, has left on this host."""
    left = _unused(began, folder)
    if left and not users_may_be_hidden():
        time.sleep(_BETWEEN)  # a file that has just been made is mapped by now
        for path in left & _unused(began, folder):
            with contextlib.suppress(OSError):
                path.unlink()


def users_may_be_hidden(processes: Path = _PROCESSES) -> bool:
    """Whether there may be processes that use the host's shared memory and cannot be seen to."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
            return True
    except OSError:
        return True
    return any(map(_hides_shared_memory, processes.glob("[0-9]*")))


def _unused(began: float, folder: Path) -> set[Path]:
    host = os.uname().nodename
    names = {f"sm_segment.{name}.*" for name in (host, host.partition(".")[0])}
    found = set()
    for pattern in ("mpich_shm_*", "mpich_vci_*", *names):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.geteuid() and status.st_mtime >= began:
                    found.add(path)
    used = set(_in_use()) if found else set()
    return {path for path in found if str(path) not in used}


def _in_use() -> Iterator[str]:
    """The files in ``/dev/shm`` and the like that processes have mapped or open."""
    for process in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.partition("/")[1] + line.partition("/")[2]
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(file)


def _hides_shared_memory(process: Path) -> bool:
    """Whether a process of this user has shared memory, but does not show which. The system's first process is no
    rank."""
    with contextlib.suppress(OSError):
        if process.name == "1" or process.stat().st_uid != os.geteuid():
            return False
        try:
            with (process / "maps").open("rb") as file:
                file.read(1)
        except (FileNotFoundError, ProcessLookupError):
            return False  # it has just ended
        except OSError:
            return _NO_SHARED_MEMORY.search((process / "status").read_text(errors="replace")) is None
    return False
