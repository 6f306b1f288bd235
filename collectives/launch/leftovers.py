"""Shared memory that MPI leaves behind when ranks die: some MB in ``/dev/shm`` each time.

A file is taken for the job's own leftover if it is named as MPICH or Open MPI name theirs, belongs to this user, was last changed
after the job began, and no process has it mapped or open, at two looks. The files of another job that runs are mapped by its ranks.
Where the processes of others who see the same ``/dev/shm`` may be hidden (a container with the host's), nothing is touched.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/dev/shm")
_PATTERNS = ("mpich_shm_*", "mpich_vci_*", "sm_segment.*")
_BETWEEN = 0.05
_INITIAL = {"pid": 4026531836, "ipc": 4026531839}
"""The numbers of the system's first namespaces (Linux)."""


def sweep(began: float, folder: Path = _FOLDER) -> None:
    """Remove what a job that began then, and has ended, has left on this host."""
    left = _unused(began, folder)
    if left and not _others_are_hidden():
        time.sleep(_BETWEEN)  # a file that has just been made is mapped by now
        for path in left & _unused(began, folder):
            with contextlib.suppress(OSError):
                path.unlink()


def _unused(began: float, folder: Path) -> set[Path]:
    found = set()
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_uid == os.geteuid() and status.st_mtime >= began:
                    found.add(path)
    used = set(_in_use()) if found else set()
    return {path for path in found if str(path) not in used}


def _in_use() -> Iterator[str]:
    """The files in ``/dev/shm`` and the like that processes have mapped or open."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                yield line.partition("/")[1] + line.partition("/")[2]
            for file in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    yield os.readlink(file)


def _others_are_hidden() -> bool:
    """Whether this process shares the memory of the host, but does not see its processes."""
    with contextlib.suppress(OSError):
        spaces = {name: os.stat(f"/proc/self/ns/{name}").st_ino for name in _INITIAL}
        return spaces["ipc"] == _INITIAL["ipc"] and spaces["pid"] != _INITIAL["pid"]
    return True
