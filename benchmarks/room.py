"""Whether the buffers of a run fit into this host's memory, told before the first one is allocated."""

from __future__ import annotations


def needed_bytes(largest: int, peers: bool, memories: int = 1) -> int:
    """Memory that one rank needs for a largest size: input and work in each kind of memory, a result, and the temporary
    copy of a peer."""
    return largest * (2 * memories + (2 if peers else 1))


def available_bytes(meminfo: str | None = None, limit: str | None = None, used: str | None = None) -> int | None:
    """Free memory of this host in bytes, or of this container if it has less; None where the system does not tell.

    The arguments are the texts of /proc/meminfo, and of a control group's ``memory.max`` and ``memory.current``.
    """
    meminfo = read("/proc/meminfo") if meminfo is None else meminfo
    limit = read("/sys/fs/cgroup/memory.max") if limit is None else limit
    used = read("/sys/fs/cgroup/memory.current") if used is None else used
    free = [int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemAvailable:")]
    if limit.strip().isdigit() and used.strip().isdigit():
        free.append(max(0, int(limit) - int(used)))
    return min(free, default=None)


def read(path: str) -> str:
    """A small system file's text; empty where there is no such file."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def check_memory(largest: int, peers: bool, ranks_here: int, available: int | None, memories: int = 1) -> str | None:
    """None when the buffers fit; otherwise a message that says what is needed, what there is, and what to do."""
    needed = needed_bytes(largest, peers, memories) * ranks_here
    if available is None or needed <= available:
        return None
    return (
        f"-e {largest}: {ranks_here} ranks on this host need about {needed / 2**30:.1f} GiB, but "
        f"{available / 2**30:.1f} GiB are free; "
        "choose a smaller -e, fewer ranks, or no --peers"
    )
