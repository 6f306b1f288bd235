"""Run a job: start its ranks, forward their output, watch for failures, and clean up all processes.

What starts and ends the ranks is given: `mpi_ranks.MpiRanks` by an MPI launcher, `agents.Agents` without MPI. After a
rank's failure or a signal the ranks have a bounded time to end; then all descendants of this process are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from collectives.launch import shared_memory_cleanup
from collectives.launch.agent import adopt_orphans, descendants, end_descendants
from collectives.launch.output import Output
from collectives.launch.records import Record, culprit

_Notices = Callable[[float, Sequence[int], Sequence[int]], tuple[list[int], list[int], list[int]]]
_LOOK = 0.1
"""Seconds between checks of withheld output; output, a process's end and signals are handled at once."""
_AFTER_SIGNAL = 5.0
_AFTER_END = 1.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ranks(Protocol):
    """The ranks of a job, by the processes that start and end them.

    Attributes:
        processes: those processes, once started.
        ends_within: seconds after `end` until they are killed.
        code: the exit code of the job if no rank has left a failure record.
    """

    ends_within: float

    @property
    def processes(self) -> Sequence[subprocess.Popen[bytes]]: ...

    @property
    def code(self) -> int: ...

    def start(self, output: Output) -> None:
        """Start the processes, and attach what they write to ``output``."""

    def waiting(self) -> tuple[list[int], list[int]]:
        """Return further file descriptors to wait for: to read from, and to write to."""

    def turn(self, readable: Sequence[int], writable: Sequence[int]) -> None:
        """Handle what can be read and written, and what was due."""

    def running(self) -> bool:
        """Whether any process runs."""

    def failures(self) -> list[Record]:
        """Return the failures that were seen from here."""

    def end_at(self) -> float:
        """Return when the ranks are to be ended for a failure, on the monotonic clock; infinite: there is none."""

    def send_signal(self, number: int) -> None:
        """Forward a signal to the ranks."""

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Keep the ranks running in the body, in which this process is stopped, as by Ctrl-Z."""

    def end(self) -> None:
        """End the ranks; does not wait."""

    def kill(self) -> None:
        """Kill the ranks that are not descendants of this process; waits a bounded time."""

    def close(self) -> None:
        """Release everything."""


def run(ranks: Ranks, output: Output) -> int:
    """Run a job to its end.

    Args:
        output: shows the ranks' output and collects their failure records.

    Returns:
        0; or the exit code of the rank that failed first, whose traceback is printed last; or 128 + N after signal N.
    """
    spare = set(descendants())
    began = time.time()
    with _noticing() as notices, contextlib.ExitStack() as after, contextlib.closing(ranks):
        adopt_orphans()
        after.callback(adopt_orphans, False)
        try:
            ranks.start(output)
            ended_by, when = _watch(ranks, notices, output)
        finally:
            _sweep(ranks, spare)
            shared_memory_cleanup.sweep(began)
        _drain(output, notices)
        told = output.records.per_rank()
        recorded = {record.rank for record in told}
        records = told + [record for record in ranks.failures() if record.rank not in recorded or record.lost]
        first = culprit(record for record in records if not ended_by or record.time < when)
        output.end(first)
        while output.waiting()[1] and not _turn(output, notices, _LOOK)[0]:
            pass
        if first is not None:
            return first.code
        return 128 + ended_by if ended_by else ranks.code


def _watch(ranks: Ranks, notices: _Notices, output: Output) -> tuple[int, float]:
    """Wait for the job's end, or enforce it; return the first signal received (0: none) and its time."""
    ended_by, when = 0, 0.0
    deadline, ending = float("inf"), False
    while ranks.running():
        numbers = _turn(output, notices, _LOOK, ranks)[0]
        if output.broken and not ended_by:
            numbers = [signal.SIGPIPE]
        for number in numbers:
            if number == signal.SIGTSTP:
                with ranks.stopped():
                    os.kill(os.getpid(), signal.SIGSTOP)
                continue
            if ended_by == number == signal.SIGINT:
                deadline, ending = 0.0, True  # a second Ctrl-C ends the job at once
            if not ended_by:
                ended_by, when = number, time.time()
                output.interrupted = True
                deadline = min(deadline, time.monotonic() + _AFTER_SIGNAL)
            ranks.send_signal(signal.SIGTERM if number == signal.SIGPIPE else number)
        if not ending:
            deadline = min(deadline, ranks.end_at())
        if time.monotonic() > deadline:
            if ending:
                break
            ranks.end()
            deadline, ending = time.monotonic() + ranks.ends_within, True
    return ended_by, when


def _drain(output: Output, notices: _Notices) -> None:
    """Read and show the rest of the pipes' contents; a signal ends this."""
    while True:
        sources, sinks = output.waiting()
        numbers, moved = _turn(output, notices, 0.0 if sources else _LOOK)
        if numbers or not (moved or (sinks and not sources)):
            return


def _turn(output: Output, notices: _Notices, seconds: float, ranks: Ranks | None = None) -> tuple[list[int], bool]:
    """Wait a bounded time for signals and output; return the signals, and whether there was output to read."""
    sources, sinks = output.waiting()
    further = ranks.waiting() if ranks else ([], [])
    numbers, readable, writable = notices(seconds, sources + further[0], sinks + further[1])
    output.turn([source for source in readable if source in sources], writable)
    if ranks:
        ranks.turn(readable, writable)
    return numbers, any(source in sources for source in readable)


@contextlib.contextmanager
def _noticing() -> Iterator[_Notices]:
    """Handle signals, and yield a function that waits a bounded time for signals, ended children and file descriptors.

    The function takes seconds, descriptors to read from and to write to; it returns signals and ready descriptors.
    """
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)

    def wait(seconds: float, sources: Sequence[int], sinks: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        readable, writable, _ = select.select([wake, *sources], sinks, [], seconds)
        numbers: list[int] = []
        if wake in readable:
            readable.remove(wake)
            numbers = [number for number in os.read(wake, 4096) if number != signal.SIGCHLD]
        return numbers, readable, writable

    # Signals that were ignored at start-up stay ignored: SIGHUP under nohup, SIGINT in a script's background.
    noted = [number for number in (*_FORWARDED, signal.SIGTSTP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)  # first: it alone says which signal has arrived
    before = {number: signal.signal(number, lambda number, frame: None) for number in (*noted, signal.SIGCHLD)}
    try:
        yield wait
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(waker)


def _sweep(ranks: Ranks, spare: set[int]) -> None:
    """Wait a bounded time for the job's processes to end, then kill them. Other systems than Linux leave this to
    ``rank.py``."""
    if ranks.running():
        ranks.kill()
    own = {process.pid for process in ranks.processes}

    def reap(left: Collection[int]) -> None:
        for process in ranks.processes:
            process.poll()
        for pid in set(left) - own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    end_descendants(0.0 if ranks.running() else _AFTER_END, spare, reap)
    for process in ranks.processes:
        if process.poll() is None:
            process.kill()
            process.wait()
