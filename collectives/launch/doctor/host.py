"""This host's memory, limits and CPUs."""

from __future__ import annotations

import os
import re
import resource
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from collectives.base.config import in_units
from collectives.launch.doctor.findings import FINE, SLOW, WRONG, Finding
from collectives.tensors.arena import never_overcommits
from collectives.tensors.arena_piece import HUGE_PAGE, Piece, huge_pages_must_be_asked_for, text_of

_SHARED = "/dev/shm"
_LEAST_SHARED = 1 << 30
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_NEEDS_SHARED = "torch's DataLoader workers, multiprocessing, NCCL and MPI's own shared memory"


def memory() -> Iterator[Finding]:
    """Check /dev/shm and huge pages."""
    yield shared_folder(_SHARED)
    if never_overcommits():
        cost = "memory is set aside at allocation: large arrays may be refused while memory is free"
        yield Finding("overcommit", SLOW, "vm.overcommit_memory is 2", cost, "sysctl vm.overcommit_memory=0")
    before = _huge_kilobytes()
    piece = Piece(0, HUGE_PAGE, huge_pages_must_be_asked_for())
    piece.touch(0, HUGE_PAGE)
    piece.memory[:] = 1
    huge = _huge_kilobytes() > before
    piece.end()
    if huge:
        yield Finding("huge pages", FINE, "the system makes them for memory that ranks share")
    else:
        cost = "first writes to large arrays take five to ten times as long, their reductions a third longer"
        cure = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or Linux 6.1 or newer"
        yield Finding("huge pages", SLOW, "none for memory that ranks share", cost, cure)


def shared_folder(path: str) -> Finding:
    """Check that the folder for shared memory exists, is writable and large enough."""
    cure = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm; in a container --shm-size=8g or --ipc=host"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            os.posix_fallocate(file.fileno(), 0, HUGE_PAGE)
        status = os.statvfs(path)
    except OSError as error:
        return Finding("/dev/shm", WRONG, f"{error.strerror or error}", f"{_NEEDS_SHARED} fail", cure)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{in_units(size)}, {in_units(free)} free"
    if free < _LEAST_SHARED:
        return Finding("/dev/shm", SLOW, found, f"{_NEEDS_SHARED} fail once it is full", cure)
    return Finding("/dev/shm", FINE, found)


def _huge_kilobytes() -> int:
    """What this process has mapped of shared memory in huge pages."""
    return sum(map(int, re.findall(r"^(?:Shmem|File)PmdMapped:\s+(\d+)", text_of("/proc/self/smaps_rollup"), re.M)))


def sharing(world: Mapping[str, Any]) -> Iterator[Finding]:
    """Explain what ranks of this host could not share, by the description of a world of two (`rank.py`)."""
    if not world["shares_memory"]:
        cost = "ranks of this host exchange bytes as messages, several times slower than through memory"
        cure = "mount /proc and /dev/shm, and start all ranks as one user and in one container"
        yield Finding("shared memory", SLOW, "ranks of this host cannot share memory", cost, cure)
        return
    maps = "" if world["maps"] else "peers' arrays cannot be mapped"
    if maps:
        cure = "mount /proc; unset COLLECTIVES_ARENA"
        yield Finding("mapped memory", SLOW, maps, "tensors are copied to be exchanged", cure)
    if world["reads_private"]:
        yield Finding("peers' memory", FINE, "ranks read each other's memory (process_vm_readv)")
    else:
        found, cure = why_refused(text_of(_YAMA).strip(), text_of("/proc/self/status"))
        cost = "tensors in private memory are copied once more, through windows"
        yield Finding("peers' memory", SLOW, f"process_vm_readv is refused: {found}", cost, cure)


def why_refused(yama: str, status: str) -> tuple[str, str]:
    """Return why the system refuses direct reads, and what to do.

    Args:
        yama: what ``ptrace_scope`` says; empty without Yama.
        status: ``/proc/self/status``.
    """
    if yama in ("2", "3"):
        return f"kernel.yama.ptrace_scope is {yama}", "sysctl kernel.yama.ptrace_scope=1 (3 lasts until the next boot)"
    if re.search(r"^Seccomp:\s+2", status, re.M):
        return "a seccomp filter is active", "docker run --cap-add=SYS_PTRACE, or a profile that allows it"
    return "ranks are of other users or containers", "start all ranks as one user, in one container"


def limits() -> Iterator[Finding]:
    """Check limits of files, processes and locked memory."""
    rows = [
        ("open files", "-n", resource.RLIMIT_NOFILE, 1024, "a rank keeps a connection to each on other hosts"),
        ("processes", "-u", resource.RLIMIT_NPROC, 1024, "frameworks' threads cannot be started"),
    ]
    if Path("/sys/class/infiniband").exists():
        rows.append(("locked memory", "-l", resource.RLIMIT_MEMLOCK, 64 << 20, "InfiniBand fails or is slow"))
    held = []
    for name, flag, number, least, cost in rows:
        soft = resource.getrlimit(number)[0]
        text = f"{'unlimited' if soft == resource.RLIM_INFINITY else soft}"
        if text == "unlimited" or soft >= least:
            held.append(f"{name} {text}")
            continue
        cure = f"ulimit {flag} {least >> 10 if flag == '-l' else least}, or /etc/security/limits.conf"
        yield Finding("limits", SLOW, f"{soft} {name}", cost, cure)
    if held:
        yield Finding("limits", FINE, ", ".join(held))


def cpus() -> Finding:
    """Check that the control group grants all CPUs that the system shows."""
    shown, granted = len(os.sched_getaffinity(0)), quota(text_of("/proc/self/cgroup"), "/sys/fs/cgroup")
    if granted >= shown:
        return Finding("CPUs", FINE, f"{shown} of {os.cpu_count()}")
    cost = "frameworks start a thread for each, and all of them are stopped for a part of the time"
    cure = f"start at most {max(1, int(granted))} ranks, with OMP_NUM_THREADS=1; or raise the container's --cpus"
    return Finding("CPUs", SLOW, f"{shown} are visible, the control group grants {granted:g}", cost, cure)


def quota(groups: str, root: str) -> float:
    """Return the number of CPUs that the control groups of this process grant; infinite without a limit.

    Args:
        groups: ``/proc/self/cgroup``.
        root: the folder of control groups.
    """
    least = float("inf")
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for folder in {Path(root, controllers), Path(root, controllers, path.lstrip("/"))}:
            words = text_of(str(folder / "cpu.max")).split() or [
                text_of(str(folder / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")
            ]
            if words[0].isdigit() and words[1].isdigit():
                least = min(least, int(words[0]) / int(words[1]))
    return least
