"""Run a job: start the MPI launcher, forward its output, watch for failures, and clean up all processes.

MPI launchers do not end reliably: Open MPI's was seen to hang, ignoring SIGTERM, after a rank had died during start-up.
So after a rank's failure or a signal the launcher has a bounded time to end; then all descendants of this process are
killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from collectives.launch import shared_memory_cleanup
from collectives.launch.output import Output
from collectives.launch.records import culprit

_Notices = Callable[[float, Sequence[int], Sequence[int]], tuple[list[int], list[int], list[int]]]
_LOOK = 0.1
"""Seconds between checks of withheld output; output, the launcher's end and signals are handled at once."""
_AFTER_FAILURE = 6.0
_AFTER_SIGNAL = 5.0
_AFTER_TERMINATE = 1.5
_AFTER_END = 1.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 1


def run(command: Sequence[str], environment: Mapping[str, str], output: Output) -> int:
    """Run the launcher's command to its end.

    Args:
        command, environment: of the MPI launcher.
        output: shows the ranks' output and collects their failure records.

    Returns:
        0; or the exit code of the rank that failed first, whose traceback is printed last; or 128 + N after signal N.
    """
    mine = set(_descendants())
    began = time.time()
    with _noticing() as notices, _adopting_orphans():
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        assert process.stdout is not None and process.stderr is not None
        with process.stdout, process.stderr:
            output.attach(process.stdout.fileno(), process.stderr.fileno())
            try:
                ended_by, when = _watch(process, notices, output)
            finally:
                _sweep(process, mine)
                shared_memory_cleanup.sweep(began)
            _drain(output, notices)
        found = [record for record in output.records.found() if not ended_by or record.time < when]
        first = culprit(found)
        output.end(first)
        while output.waiting()[1] and not _turn(output, notices, _LOOK)[0]:
            pass
    if first is not None:
        return first.code
    if ended_by:
        return 128 + ended_by
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _watch(process: subprocess.Popen[bytes], notices: _Notices, output: Output) -> tuple[int, float]:
    """Wait for the launcher's end, or enforce it; return the first signal received (0: none) and its time."""
    ended_by, when = 0, 0.0
    deadline, terminated = float("inf"), False
    while process.poll() is None:
        numbers = _turn(output, notices, _LOOK)[0]
        if output.broken and not ended_by:
            numbers = [signal.SIGPIPE]
        for number in numbers:
            if ended_by == number == signal.SIGINT:
                deadline, terminated = 0.0, True  # a second Ctrl-C ends the job at once
            if not ended_by:
                ended_by, when = number, time.time()
                output.interrupted = True
                deadline = min(deadline, time.monotonic() + _AFTER_SIGNAL)
            process.send_signal(signal.SIGTERM if number == signal.SIGPIPE else number)
        if deadline == float("inf") and output.records:
            deadline = time.monotonic() + _AFTER_FAILURE
        if time.monotonic() > deadline:
            if terminated:
                break
            output.say("the MPI launcher goes on although the job has ended; ending it")
            process.terminate()
            deadline, terminated = time.monotonic() + _AFTER_TERMINATE, True
    return ended_by, when


def _drain(output: Output, notices: _Notices) -> None:
    """Read and show the rest of the pipes' contents; a signal ends this."""
    while True:
        sources, sinks = output.waiting()
        numbers, moved = _turn(output, notices, 0.0 if sources else _LOOK)
        if numbers or not (moved or (sinks and not sources)):
            return


def _turn(output: Output, notices: _Notices, seconds: float) -> tuple[list[int], bool]:
    """Wait a bounded time for signals and output; return the signals, and whether there was output to read."""
    numbers, readable, writable = notices(seconds, *output.waiting())
    output.turn(readable, writable)
    return numbers, bool(readable)


@contextlib.contextmanager
def _noticing() -> Iterator[_Notices]:
    """Handle signals, and yield a function that waits a bounded time for signals, ended children and file descriptors.

    The function takes seconds, descriptors to read from and to write to; it returns signals and ready descriptors.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)

    def wait(seconds: float, sources: Sequence[int], sinks: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        readable, writable, _ = select.select([wake, *sources], sinks, [], seconds)
        if wake in readable:
            os.read(wake, 4096)
            readable.remove(wake)
        taken = came[:]
        del came[: len(taken)]
        return taken, readable, writable

    # Signals that were ignored at start-up stay ignored: SIGHUP under nohup, SIGINT in a script's background.
    before = {
        number: signal.signal(number, note) for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN
    }
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    try:
        yield wait
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)
        os.close(waker)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Adopt processes that the launcher leaves behind when it dies, so that they can be found (Linux)."""
    if sys.platform != "linux":
        yield
        return
    control = ctypes.CDLL(None).prctl
    control(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        control(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def die_with_parent() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` that has the kernel send SIGTERM to the child when this process dies (Linux)."""
    if sys.platform != "linux":
        return None
    control = ctypes.CDLL(None).prctl
    return lambda: control(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0) and None


def _sweep(process: subprocess.Popen[bytes], mine: set[int]) -> None:
    """Wait a bounded time for the job's processes to end, then kill them. Other systems than Linux leave this to
    ``rank.py``."""
    kill_from = time.monotonic() + (_AFTER_END if process.poll() is not None else 0.0)
    end = kill_from + 5.0
    while (left := set(_descendants()) - mine) and time.monotonic() < end:
        if time.monotonic() >= kill_from:
            for pid in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        process.poll()
        for pid in left - {process.pid}:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)  # only children can be waited for, not all descendants
    if process.poll() is None:
        process.kill()
        process.wait()


def _descendants() -> Iterator[int]:
    """Yield all living descendants of this process (Linux; none elsewhere)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == os.getpid():
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    reached = [os.getpid()]
    for pid in reached:
        below = children.get(pid, [])
        reached += below
        yield from below
