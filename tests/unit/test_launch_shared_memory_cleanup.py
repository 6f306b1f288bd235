"""Shared memory that a job has left is removed; another job's is not touched."""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import pytest

from collectives.launch import shared_memory_cleanup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /dev/shm")
HOST = os.uname().nodename


@pytest.fixture(autouse=True)
def _all_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As outside of containers, in which the tests may run."""
    monkeypatch.setattr(shared_memory_cleanup, "_INITIAL_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino)


def make(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    return path


@pytest.mark.parametrize("name", ["mpich_shm_1a2b_0", "mpich_vci_1a2b_0", f"sm_segment.{HOST}.0.15260000.0"])
def test_what_nobody_uses_is_removed(name: str, tmp_path: Path) -> None:
    path = make(tmp_path, name)
    shared_memory_cleanup.sweep(time.time() - 60, tmp_path)
    assert not path.exists()


def test_what_is_not_the_jobs_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = make(tmp_path, "mpich_shm_1_0")
    os.utime(older, (time.time() - 90, time.time() - 90))
    other, elsewhere = make(tmp_path, "something_else"), make(tmp_path, f"sm_segment.other-{HOST}.0.15260000.0")
    mapped, opened = make(tmp_path, "mpich_shm_2_0"), make(tmp_path, "mpich_shm_3_0")
    with mapped.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 4096)
    with opened.open("rb"):
        shared_memory_cleanup.sweep(time.time() - 60, tmp_path)
    assert older.exists() and other.exists() and elsewhere.exists() and mapped.exists() and opened.exists()
    memory.close()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    shared_memory_cleanup.sweep(time.time() - 60, tmp_path)
    assert mapped.exists() and opened.exists()


def test_where_others_cannot_be_seen_nothing_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "mpich_shm_1_0")
    monkeypatch.setattr(shared_memory_cleanup, "_INITIAL_PID_NAMESPACE", os.stat("/proc/self/ns/pid").st_ino + 1)
    shared_memory_cleanup.sweep(time.time() - 60, tmp_path)
    assert path.exists()


@pytest.mark.parametrize(("pid", "shared", "hides"), [("7", 4, True), ("7", 0, False), ("1", 4, False)])
def test_a_process_that_shows_no_maps_but_has_shared_memory_hides_it(
    pid: str, shared: int, hides: bool, tmp_path: Path
) -> None:
    (tmp_path / pid / "maps").mkdir(parents=True)  # cannot be read, not even by the superuser
    (tmp_path / pid / "status").write_text(f"Name:\tpython\nRssShmem:\t{shared:8} kB\n")
    assert shared_memory_cleanup.users_may_be_hidden(tmp_path) is hides
