"""Remove shared memory that MPI leaves behind when ranks die: some MB in ``/dev/shm`` each time.

A file is removed if it is named as MPICH or Open MPI name theirs on this host, belongs to this user, was last changed
after the job began, and at two checks no process has it mapped or open. Files of other running jobs are mapped by their
ranks. Nothing is removed where such ranks may be invisible: in any container, because another one may share its
``/dev/shm``, and beside a process of this user that has shared memory but cannot be inspected.
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
"""Its inode number (Linux). Processes in it see those of all other namespaces."""
_NO_SHARED_MEMORY = re.compile(r"^RssShmem:\s+0 kB$", re.MULTILINE)


def sweep(began: float, folder: Path = _FOLDER) -> None:
    """Remove the files that a job has left on this host since it ``began``, in seconds since the epoch."""
    left = _unused(began, folder)
    if left and not users_may_be_hidden():
        time.sleep(_BETWEEN)  # by then a newly created file is mapped
        for path in left & _unused(began, folder):
            with contextlib.suppress(OSError):
                path.unlink()


def users_may_be_hidden(processes: Path = _PROCESSES) -> bool:
    """Whether processes may use the host's shared memory without being visible."""
    try:
        if os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE:
            return True
    except OSError:
        return True
    return any(map(_hides_shared_memory, processes.glob("[0-9]*")))


def _unused(began: float, folder: Path) -> set[Path]:
    host = os.uname().nodename
    names = {f"sm_segment.{name}.*" for name in (host, host.partition(".")[0])}
    files = set()
    for pattern in ("mpich_shm_*", "mpich_vci_*", *names):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.geteuid() and status.st_mtime >= began:
                    files.add(path)
    used = set(_in_use()) if files else set()
    return {path for path in files if str(path) not in used}


def _in_use() -> Iterator[str]:
    """Yield the paths of all files that visible processes have mapped or open."""
    for process in _PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.partition("/")[1] + line.partition("/")[2]
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(file)


def _hides_shared_memory(process: Path) -> bool:
    """Whether a process of this user has shared memory whose files cannot be read. Process 1 is not a rank."""
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
