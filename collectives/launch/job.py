"""Run a job: start its ranks, forward their output, watch for failures, and clean up all processes.

What starts and ends the ranks is given: `mpirun.MpiRanks` by an MPI launcher, `agents.Agents` without MPI. After a
rank's failure or a signal the ranks have a bounded time to end; then all descendants of this process are killed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Collection, Iterable

from collectives.launch import shared_memory_cleanup
from collectives.launch.agent import Signals, adopt_orphans, descendants, end_descendants
from collectives.launch.output import Output
from collectives.launch.records import Record, culprit

_LOOK = 0.1
"""Seconds between checks of withheld output; output, a process's end and signals are handled at once."""
_AFTER_SIGNAL = 5.0
_AFTER_END = 1.0
_RESERVE = 16
"""Descriptors that are kept for the end: whatever has taken all others, no process of the job may stay."""
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that are the program's: batch systems send them some time before a job's time limit."""
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, *_FORWARDED)


class Ranks:
    """The ranks of a job, by the processes that start and end them.

    Attributes:
        processes: those processes, once started.
        ends_within: seconds after `end` until they are killed.
    """

    ends_within: float

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    @property
    def code(self) -> int:
        """The exit code of the job if no rank has left a failure record."""
        codes = [process.returncode for process in self.processes]
        return next((code if code > 0 else 128 - code for code in codes if code), 0)

    def start(self, output: Output) -> None:
        """Start the processes, and attach what they write to ``output``."""
        raise NotImplementedError

    def waiting(self) -> tuple[list[int], list[int]]:
        """Return further file descriptors to wait for: to read from, and to write to."""
        return [], []

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        """Handle what can be read and written, and what was due."""
        raise NotImplementedError

    def running(self) -> bool:
        """Whether any process runs."""
        return any(process.poll() is None for process in self.processes)

    def failures(self) -> list[Record]:
        """Return the failures that were seen from here."""
        return []

    def counts(self, rank: int) -> bool:
        """Whether a rank's failure is the job's."""
        return True

    def end_at(self) -> float:
        """Return when the ranks are to be ended for a failure, on the monotonic clock; infinite: there is none."""
        raise NotImplementedError

    def forward(self, number: int) -> None:
        """Forward a signal to the ranks."""
        raise NotImplementedError

    def send_signal(self, number: int) -> None:
        """Forward a signal that ends the job."""
        self.forward(number)

    def stopped(self) -> contextlib.AbstractContextManager[None]:
        """Keep the ranks running in the body, in which this process is stopped, as by Ctrl-Z."""
        return contextlib.nullcontext()  # the processes have sessions of their own

    def end(self) -> None:
        """End the ranks; does not wait."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill the ranks that are not descendants of this process; waits a bounded time."""

    def close(self) -> None:
        """Release everything."""
        raise NotImplementedError


def run(ranks: Ranks, output: Output) -> int:
    """Run a job to its end.

    Args:
        output: shows the ranks' output and collects their failure records.

    Returns:
        0; or the exit code of the rank that failed first, whose traceback is printed last; or 128 + N after signal N.
    """
    spare = set(descendants())
    began = time.time()
    with contextlib.closing(Signals(_HANDLED)) as signals, contextlib.ExitStack() as after, contextlib.closing(ranks):
        adopt_orphans()
        after.callback(adopt_orphans, False)
        reserve = [os.dup(signals.source) for _ in range(_RESERVE)]
        try:
            ranks.start(output)
            ended_by, when = _watch(ranks, signals, output)
        finally:
            for descriptor in reserve:
                os.close(descriptor)
            _sweep(ranks, spare)
            shared_memory_cleanup.sweep(began)
        _drain(output, signals)
        told = [record for record in output.records.per_rank() if ranks.counts(record.rank)]
        recorded = {record.rank for record in told}
        records = told + [record for record in ranks.failures() if record.rank not in recorded or record.lost]
        first = culprit(record for record in records if not ended_by or record.time < when)
        output.end(first)
        done = output.records.first_done
        if first is None and done is not None and not ended_by and ranks.code:
            output.say(
                f"rank {done.rank} on {done.host} ended first, with exit code 0, and the other ranks were ended "
                "because of that; if it calls os._exit, let it reach the end of the program instead [L140]"
            )
        while output.waiting()[1] and not _turn(output, signals, _LOOK)[0]:
            pass
        if first is not None:
            return first.code
        return 128 + ended_by if ended_by else ranks.code


def _watch(ranks: Ranks, signals: Signals, output: Output) -> tuple[int, float]:
    """Wait for the job's end, or enforce it; return the first signal received (0: none) and its time."""
    ended_by, when = 0, 0.0
    deadline, ending = float("inf"), False
    while ranks.running():
        numbers = _turn(output, signals, _LOOK, ranks)[0]
        if output.broken and not ended_by:
            numbers = [signal.SIGPIPE]
        for number in numbers:
            if number == signal.SIGTSTP:
                with ranks.stopped():
                    os.kill(os.getpid(), signal.SIGSTOP)
                continue
            if number in _FORWARDED:
                ranks.forward(number)
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


def _drain(output: Output, signals: Signals) -> None:
    """Read and show the rest of the pipes' contents; a signal ends this."""
    while True:
        sources, sinks = output.waiting()
        numbers, moved = _turn(output, signals, 0.0 if sources else _LOOK)
        if numbers or not (moved or (sinks and not sources)):
            return


def _turn(output: Output, signals: Signals, seconds: float, ranks: Ranks | None = None) -> tuple[list[int], bool]:
    """Wait a bounded time for signals and output; return the signals, and whether there was output to read."""
    sources, sinks = output.waiting()
    further = ranks.waiting() if ranks else ([], [])
    readable, writable = _ready([signals.source, *sources, *further[0]], sinks + further[1], seconds)
    numbers = [number for number in signals.take() if number != signal.SIGCHLD]
    of_output = readable.intersection(sources)
    output.turn(of_output, writable)
    if ranks:
        ranks.turn(readable, writable)
    return numbers, bool(of_output)


def _ready(sources: Iterable[int], sinks: Iterable[int], seconds: float) -> tuple[set[int], set[int]]:
    """Wait a bounded time; return the file descriptors that can be read from, and written to. Unlike `select.select` it
    takes any number of them; unlike epoll, files too."""
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    for sink in sinks:
        poll.register(sink, select.POLLOUT)
    found = poll.poll(math.ceil(seconds * 1000))
    # What has ended or failed counts as ready, for reading or writing tells how.
    return (
        {fd for fd, events in found if events & ~select.POLLOUT},
        {fd for fd, events in found if events & ~select.POLLIN},
    )


def _sweep(ranks: Ranks, spare: set[int]) -> None:
    """Wait a bounded time for the job's processes, then kill them; ``rank.py`` does so on other systems than Linux."""
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
