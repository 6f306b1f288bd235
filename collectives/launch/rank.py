"""The small process that stands between the MPI launcher and one rank, and sees how the rank ends.

Started by ``collectivesrun`` once per rank as a plain script, without site-packages, so that it costs some ten milliseconds
and little memory: it imports nothing but what it needs, and nothing of collectives.

    mpirun -> rank.py -> python train.py

It passes the rank's stderr on and keeps the last of it in ``stderr-N`` in the run directory, passes signals on, and ends the
rank if the launcher dies. With ``--output-filename DIR`` it writes the rank's stdout and stderr into ``DIR/rank.N`` as well. A
rank that ends with a failure, whatever kind it is (an exception before ``init()``, ``os._exit``, ``kill -9``), leaves a record
``end-N.json`` in the run directory; the exit code is handed on to the launcher, 128 + N for signal N.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
HOROVOD_VARIABLES = {
    "HOROVOD_RANK": RANK_VARIABLES,
    "HOROVOD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "HOROVOD_LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "HOROVOD_LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""What ``horovodrun`` tells a rank that programs read, and where Open MPI or MPICH tells the same."""
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
KEPT = 64 << 10
"""How many bytes of stderr are kept, at least."""
_LOOK = 1.0
"""Seconds between two looks at whether the launcher is still alive."""


def main(run_dir: str, output: str, width: int, as_horovod: bool, command: list[str]) -> int:
    """Run the command as this rank and return its exit code.

    Args:
        run_dir: where the launcher looks for records.
        output: where the output is written as well; empty: nowhere.
        width: the digits of a rank in the names there.
        as_horovod: whether the rank's environment tells its place in Horovod's words.
        command: the rank's.
    """
    launcher = os.getppid()
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")
    if as_horovod:
        os.environ.update(_places())
    kept = _Tail(os.path.join(run_dir, f"stderr-{rank}"))
    keepers: dict[int, list[_Tail | _Copy]] = {2: [kept]}
    if output:
        folder = os.path.join(output, f"rank.{rank.zfill(width)}")
        keepers = {1: [_Copy(folder, "stdout")], 2: [kept, _Copy(folder, "stderr")]}
    child, streams = _start(command, list(keepers))
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: _send(child, number))
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)

    status: int | None = None
    while status is None:
        ready, _, _ = select.select([*streams, wake], [], [], _LOOK)
        if wake in ready:
            os.read(wake, 4096)
        for source in [source for source in streams if source in ready]:
            if not _pass_on(source, streams[source], keepers[streams[source]]):
                del streams[source]
        pid, found = os.waitpid(child, os.WNOHANG)
        if pid:
            status = found
        elif os.getppid() != launcher:
            _send(child, signal.SIGKILL)
    # What the rank wrote last is in the pipe; a process that it left behind may hold the pipe open, so never wait for its end.
    for source, target in streams.items():
        while select.select([source], [], [], 0)[0] and _pass_on(source, target, keepers[target]):
            pass

    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    if code:
        _record(run_dir, rank, code)
    return code


def _places() -> dict[str, str]:
    """What ``HOROVOD_VARIABLES`` are for this rank, as far as the MPI tells."""
    found = {ours: next((os.environ[name] for name in names if name in os.environ), "") for ours, names in HOROVOD_VARIABLES.items()}
    return {name: text for name, text in found.items() if text}


def _start(command: list[str], piped: list[int]) -> tuple[int, dict[int, int]]:
    """Start the rank in a process group of its own; return its pid, and by pipe which of its outputs comes out there."""
    pipes = {target: os.pipe() for target in piped}
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            for target, (_, theirs) in pipes.items():
                os.dup2(theirs, target)
            _die_with(parent)
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"collectivesrun: cannot run {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127)
    for source, theirs in pipes.values():
        os.close(theirs)
        os.set_blocking(source, False)
    return child, {source: target for target, (source, _) in pipes.items()}


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


class _Copy:
    """All that a rank wrote to one of its outputs, in a file. Where the file cannot be written, the rank goes on without."""

    def __init__(self, folder: str, name: str) -> None:
        path = os.path.join(folder, name)
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as error:
            self._file = -1
            os.write(2, f"collectivesrun: cannot write {path!r}: {error.strerror}\n".encode())

    def add(self, data: bytes) -> None:
        try:
            while data and self._file >= 0:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.close(self._file)
            self._file = -1


def _pass_on(source: int, target: int, keepers: list[_Tail | _Copy]) -> bool:
    """Pass on what is there, and keep it; False once nothing more can come."""
    try:
        data = os.read(source, KEPT)
    except BlockingIOError:
        return True
    if not data:
        return False
    for keeper in keepers:
        keeper.add(data)
    while data:
        try:
            data = data[os.write(target, data) :]
        except BlockingIOError:
            select.select([], [target], [], _LOOK)
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
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), bool(sys.argv[4]), sys.argv[5:]))
