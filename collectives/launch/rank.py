"""The small process that stands between the MPI launcher and one rank, and sees how the rank ends.

Started by ``collectivesrun`` once per rank as a plain script, without site-packages, so that it costs some ten milliseconds
and little memory: it imports nothing but what it needs, and nothing of collectives.

    mpirun -> rank.py -> python train.py

It passes the rank's stderr on and keeps the last of it in ``stderr-N`` in the run directory, passes signals on, and ends the
rank if the launcher dies. A rank that ends with a failure, whatever kind it is (an exception before ``init()``, ``os._exit``,
``kill -9``), leaves a record ``end-N.json`` there; the exit code is handed on to the launcher, 128 + N for signal N.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KEPT = 64 << 10
"""How many bytes of stderr are kept, at least."""
_LOOK = 1.0
"""Seconds between two looks at whether the launcher is still alive."""


def main(run_dir: str, command: list[str]) -> int:
    """Run the command as this rank and return its exit code."""
    launcher = os.getppid()
    child, errors = _start(command)
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: _send(child, number))
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    kept = _Tail(os.path.join(run_dir, f"stderr-{rank}"))
    status: int | None = None
    sources = [errors, wake]
    while status is None:
        ready, _, _ = select.select(sources, [], [], _LOOK)
        if wake in ready:
            os.read(wake, 4096)
        if errors in ready and not _pass_on(errors, kept):
            sources.remove(errors)
        pid, found = os.waitpid(child, os.WNOHANG)
        if pid:
            status = found
        elif os.getppid() != launcher:
            _send(child, signal.SIGKILL)
    # What the rank wrote last is in the pipe; a process that it left behind may hold the pipe open, so never wait for its end.
    while errors in sources and select.select([errors], [], [], 0)[0] and _pass_on(errors, kept):
        pass

    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    if code:
        _record(run_dir, rank, code)
    return code


def _start(command: list[str]) -> tuple[int, int]:
    """Start the rank in a process group of its own, its stderr in a pipe; return its pid and the pipe."""
    errors, theirs = os.pipe()
    os.set_blocking(errors, False)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            os.dup2(theirs, 2)
            _die_with(parent)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"collectivesrun: cannot run {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127)
    os.close(theirs)
    return child, errors


def _die_with(parent: int) -> None:
    """Have the system kill this process when ``parent`` dies, even by kill -9 (Linux)."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


class _Tail:
    """The last that a rank wrote to stderr, in a file: it is there even if the launcher kills this process at once.

    Where the run directory is not shared with this host, nothing is kept.
    """

    def __init__(self, path: str) -> None:
        self._recent = b""
        self._length = 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            self._file = -1

    def add(self, data: bytes) -> None:
        if self._file < 0:
            return
        self._recent = (self._recent + data)[-KEPT:]
        self._length += len(data)
        try:
            if self._length > 8 * KEPT:
                os.ftruncate(self._file, 0)
                self._length, data = len(self._recent), self._recent
            os.write(self._file, data)
        except OSError:
            os.close(self._file)
            self._file = -1


def _pass_on(source: int, kept: _Tail) -> bool:
    """Pass on what is there, and keep it; False once nothing more can come."""
    try:
        data = os.read(source, KEPT)
    except BlockingIOError:
        return True
    if not data:
        return False
    kept.add(data)
    while data:
        try:
            data = data[os.write(2, data) :]
        except BlockingIOError:
            select.select([], [2], [], _LOOK)
        except OSError:
            break  # nobody reads any more; the rank shall not notice
    return True


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        return


def _record(run_dir: str, rank: str, code: int) -> None:
    """Leave the record; where the run directory is not shared with this host, the exit code has to do."""
    entry = {"rank": int(rank), "code": code, "text": "", "time": time.time(), "host": os.uname().nodename}
    path = os.path.join(run_dir, f"end-{rank}.json")
    try:
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump(entry, file)
        os.replace(path + ".part", path)
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
