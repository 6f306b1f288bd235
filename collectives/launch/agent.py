"""The process that starts, watches and ends a job's ranks on one host, where MPI does not.

``collectivesrun`` starts one agent per host: on this host as a child, on others by ssh. Like ``rank.py`` it is a plain
script, run without site-packages, that imports only the standard library.

    collectivesrun -> agent.py -> rank.py -> python train.py
                   -> ssh -> agent.py -> rank.py -> python train.py

Its standard streams connect it with the launcher:

    stdin     lines: first the task, in JSON (environment, folder, command, ranks; nothing of it is on a command line);
              then orders: ``alive``, ``signal N`` (forwarded to the ranks), ``end`` (SIGTERM, then SIGKILL), ``kill``;
              in elastic jobs also ``start JSON`` (a rank's variables) and ``kill RANK``
    stdout    lines that begin with DLE: ``ready PORT ADDRESS`` (a port that is free here, and this host's address,
              where ssh tells it), ``alive``, ``ended RANK CODE``, ``done``
    stderr    the frames of ``rank.py``, and plain messages

The end of stdin means that the launcher or the connection is gone, and ends the ranks; so does silence, because a
host without power or network closes no connection. No process of a rank outlives the agent. If the agent is killed,
``rank.py`` ends its rank. An agent of an elastic job (``stays`` in its task) goes on without any rank until then, and
kills a rank that is stopped for too long: peers on its host, who share memory with it, would wait for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

MARK = b"\x10"
"""The first byte of each line on stdout; lines without it are a shell's."""
ALIVE_EVERY = 0.5
"""Seconds between signs of life, in both directions."""
_AFTER_TERMINATE = 1.5
_AFTER_END = 1.0
_AFTER_KILL = 5.0
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ = 64 << 10


def main() -> int:
    """Run the ranks of the task that stdin describes; return the exit code of the first that failed, or 0."""
    # Batch systems send SIGUSR1 or SIGUSR2, if asked to, to all processes that they have started: for the ranks.
    signals, orders = Signals((*_ENDING, signal.SIGUSR1, signal.SIGUSR2)), _Orders()
    _say(f"ready {free_port()} {' '.join(os.environ.get('SSH_CONNECTION', '').split()[2:3])}")
    while (line := orders.take()) is None:
        if orders.closed or any(number in _ENDING for number in signals.take()):
            return 0
        select.select([0, signals.source], [], [])
        orders.read()
    task: dict[str, Any] = json.loads(line)
    try:
        os.chdir(task["folder"])
    except OSError as error:
        text = f"cannot enter the folder {task['folder']!r}: {error.strerror}; create it on every host [L55]\n"
        os.write(2, text.encode())
        return 1
    adopt_orphans()
    ranks = _Ranks(task)
    _watch(ranks, orders, signals, task["patience"] or float("inf"))
    end_descendants(_AFTER_END)
    _say("done")
    return ranks.code


def _watch(ranks: _Ranks, orders: _Orders, signals: Signals, patience: float) -> None:
    """Obey orders until all ranks have ended; ``patience``: seconds of the launcher's silence that end them."""
    heard, spoken = time.monotonic(), 0.0
    while ranks.running or ranks.stays:
        sources = [signals.source] if orders.closed else [0, signals.source]
        ready, _, _ = select.select(sources, [], [], max(0.0, min(ALIVE_EVERY, ranks.kill_at - time.monotonic())))
        now = time.monotonic()
        if 0 in ready:
            orders.read()
            heard = now
        while (order := orders.take()) is not None:
            ranks.obey(*order.split(maxsplit=1))
        if orders.closed or now - heard > patience or any(number in _ENDING for number in signals.take()):
            ranks.obey("end")
        ranks.reap()
        if now >= ranks.kill_at:
            ranks.obey("kill")
        # A launcher that is stopped reads nothing, and must not block this process.
        if now - spoken >= ALIVE_EVERY and select.select([], [1], [], 0)[1]:
            _say("alive")
            spoken = now
            ranks.end_stopped()


def free_port() -> int:
    """Return an unused port of this host, below the range from which Linux assigns ports by itself."""
    with socket.socket() as probe:
        for _ in range(100):
            port = 20000 + int.from_bytes(os.urandom(4), "big") % 12000
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                break
        return int(probe.getsockname()[1])


class _Orders:
    """The lines on stdin."""

    def __init__(self) -> None:
        os.set_blocking(0, False)
        self.closed = False
        self._data = b""

    def read(self) -> None:
        """Read what is there."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(0, _READ)
            self._data += data
            self.closed = not data

    def take(self) -> str | None:
        """Return the next line; None if it is not complete."""
        line, end, rest = self._data.partition(b"\n")
        if not end:
            return None
        self._data = rest
        return line.decode()


class Signals:
    """Signals to this process and the ends of its children, by a file descriptor to wait for.

    Signals that were ignored at start-up stay ignored: SIGHUP under nohup, SIGINT in a script's background.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self.source, self._waker = os.pipe()
        for end in (self.source, self._waker):
            os.set_blocking(end, False)
        self._waker_before = signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        noted = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        # First the descriptor: it alone says which signal has arrived.
        self._before = {
            number: signal.signal(number, lambda number, frame: None) for number in (*noted, signal.SIGCHLD)
        }

    def take(self) -> bytes:
        """Return the numbers of the signals that have arrived."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.source, _READ)
        return b""

    def close(self) -> None:
        """Handle signals as before."""
        signal.set_wakeup_fd(self._waker_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.source)
        os.close(self._waker)


class _Ranks:
    """The ranks on this host.

    Attributes:
        running: rank by the pid of its ``rank.py``.
        code: the exit code of the first that failed, or 0; of an elastic job always 0.
        kill_at: when the processes are killed, on the monotonic clock.
        stays: whether further ranks may be started.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.running: dict[int, str] = {}
        self.code = 0
        self.kill_at = float("inf")
        self.stays = self._elastic = task["stays"]
        self._most_stopped = task["most_stopped"]
        self._stopped: dict[str, float] = {}
        program = os.path.join(os.path.dirname(__file__), "rank.py")
        self._command = [sys.executable, "-I", "-S", program, *task["command"]]
        self._environment = {**os.environ, **task["environment"]}
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._dying = die_with_parent()
        self._input: int | None = task["stdin"]
        if self._input is not None:
            os.set_inheritable(self._input, False)
        for variables in task["ranks"]:
            self._start(variables)

    def _start(self, variables: Mapping[str, str]) -> None:
        """Start a rank; the first one gets the launcher's stdin, where the task has it."""
        source, self._input = self._input, None
        stdin = self._nothing if source is None else source
        pid = _start(self._command, {**self._environment, **variables}, stdin, self._dying)
        self.running[pid] = variables["COLLECTIVES_RANK"]
        if source is not None:
            os.close(source)

    def obey(self, order: str, argument: str = "") -> None:
        """Carry out an order of the launcher's."""
        if order == "signal":
            self._signal(int(argument))
        elif order == "start" and self.stays:
            self._start(json.loads(argument))
        elif order == "end" and self.kill_at == float("inf"):
            self.stays = False
            self.kill_at = time.monotonic() + _AFTER_TERMINATE
            self._signal(signal.SIGTERM)
        elif order == "kill" and argument:
            self._signal(signal.SIGQUIT, argument)
        elif order == "kill":
            self.stays = False
            end_descendants(0.0, reap=lambda left: self.reap())
            self.running.clear()  # what cannot be killed; on other systems than Linux, rank.py ends the rank

    def end_stopped(self) -> None:
        """Kill ranks that were found stopped in every beat for too long (Linux); only those of elastic jobs."""
        for pid, rank in self.running.items() if self._elastic else ():
            if _child_is_stopped(pid):
                self._stopped[rank] = self._stopped.get(rank, 0.0) + ALIVE_EVERY
                if self._stopped[rank] > self._most_stopped:
                    text = f"killed rank {rank}: its process was stopped (SIGSTOP) for {self._most_stopped:g} s [L2]\n"
                    os.write(2, text.encode())
                    self.obey("kill", rank)
            else:
                self._stopped.pop(rank, None)

    def reap(self) -> None:
        """Take note of ended processes, and tell the launcher of ranks."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                rank = self.running.pop(ended[0], None)
                if rank is not None:
                    code = os.waitstatus_to_exitcode(ended[1])
                    code = 128 - code if code < 0 else code
                    self.code = self.code or (0 if self._elastic else code)
                    _say(f"ended {rank} {code}")

    def _signal(self, number: int, only: str = "") -> None:
        for pid, rank in self.running.items():
            if only in ("", rank):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


def _start(command: list[str], environment: Mapping[str, str], stdin: int, dying: Callable[[], None]) -> int:
    """Start a ``rank.py``; return its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.dup2(stdin, 0)
        os.dup2(2, 1)
        dying()
        if os.getppid() == parent:
            os.execve(command[0], command, environment)
    except OSError as error:
        os.write(2, f"cannot run {command[0]!r}: {error.strerror} [L56]\n".encode())
    finally:
        os._exit(127)


def _child_is_stopped(pid: int) -> bool:
    """Whether the first child of a process is stopped, as by SIGSTOP (Linux)."""
    with contextlib.suppress(OSError, IndexError):
        with open(f"/proc/{pid}/task/{pid}/children") as children:
            child = children.read().split()[0]
        with open(f"/proc/{child}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    return False


def _say(text: str) -> None:
    """Write a line to the launcher, unless it reads no more, which stdin tells."""
    with contextlib.suppress(OSError):
        os.write(1, MARK + text.encode() + b"\n")


def die_with_parent() -> Callable[[], None]:
    """Return a function for a forked child: the kernel sends it SIGTERM when this process dies (Linux)."""
    if sys.platform != "linux":
        return lambda: None
    control = _prctl()
    return lambda: control(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0) and None


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of descendants whose parent dies, so that they can be found (Linux); or no longer."""
    if sys.platform == "linux":
        _prctl()(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _prctl() -> Any:
    # Imported when the launcher has opened its closed standard streams: from version 3.5 on, libffi opens its own file
    # when it is loaded, and keeps the lowest free number, which would be that of a closed stream.
    import ctypes

    return ctypes.CDLL(None).prctl


def end_descendants(
    grace: float, spare: Collection[int] = (), reap: Callable[[Collection[int]], object] | None = None
) -> None:
    """Wait ``grace`` seconds for the descendants of this process to end, then kill them, but those to spare (Linux).

    Args:
        reap: called with the pids of living descendants and ended children, to wait for the latter without blocking.
    """
    kill_from = time.monotonic() + grace
    while (left := set(descendants()) - set(spare)) and time.monotonic() < kill_from + _AFTER_KILL:
        if time.monotonic() >= kill_from:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        (reap or _reap)(left)
        time.sleep(0.02)  # only children can be waited for, not all descendants


def _reap(pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def descendants() -> Iterator[int]:
    """Yield all living descendants of this process, and its ended children (Linux; none elsewhere)."""
    children: dict[int, list[int]] = {}
    processes = os.listdir("/proc") if sys.platform == "linux" else []
    for name in filter(str.isdigit, processes):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", errors="replace") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == os.getpid():
                children.setdefault(int(parent), []).append(int(name))
    reached = [os.getpid()]
    for pid in reached:
        below = children.get(pid, [])
        reached += below
        yield from below


if __name__ == "__main__":
    sys.exit(main())
