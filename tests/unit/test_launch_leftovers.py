"""Shared memory that a job has left is removed; another job's is not touched."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import pytest

from collectives.launch import leftovers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")


def make(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    return path


@pytest.mark.parametrize("name", ["mpich_shm_1a2b_0", "mpich_vci_1a2b_0", "sm_segment.host.0.15260000.0"])
def test_what_nobody_uses_is_removed(name: str, tmp_path: Path) -> None:
    path = make(tmp_path, name)
    leftovers.sweep(time.time() - 60, tmp_path)
    assert not path.exists()


def test_what_is_not_the_jobs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = make(tmp_path, "mpich_shm_1_0")
    os.utime(older, (time.time() - 90, time.time() - 90))
    other = make(tmp_path, "something_else")
    mapped, opened = make(tmp_path, "mpich_shm_2_0"), make(tmp_path, "mpich_shm_3_0")
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    with opened.open("rb"):
        leftovers.sweep(time.time() - 60, tmp_path)
    assert older.exists() and other.exists() and mapped.exists() and opened.exists()
    memory.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    leftovers.sweep(time.time() - 60, tmp_path)
    assert mapped.exists() and opened.exists()


def test_where_others_cannot_be_seen_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "mpich_shm_1_0")
    spaces = {"pid": os.stat("/proc/self/ns/pid").st_ino + 1, "ipc": os.stat("/proc/self/ns/ipc").st_ino}
    monkeypatch.setattr(leftovers, "_INITIAL", spaces)
    leftovers.sweep(time.time() - 60, tmp_path)
    assert path.exists()
