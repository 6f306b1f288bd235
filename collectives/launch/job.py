"""One job from start to end: starts the MPI launcher, passes its output on, watches for failures, and leaves nothing
behind.

An MPI launcher cannot be relied on to end: Open MPI's was seen to hang, deaf to SIGTERM, after a rank had died during
start-up. So once a rank has failed, or a signal has come, the launcher has a bounded time; then everything below this
process is killed.
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
"""Seconds between two looks at what has been held; output, the end of the launcher and signals are noticed at once."""
_AFTER_FAILURE = 6.0
_AFTER_SIGNAL = 5.0
_AFTER_TERMINATE = 1.5
_AFTER_END = 1.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 1


def run(command: Sequence[str], environment: Mapping[str, str], output: Output) -> int:
    """Run the launcher's command to its end.

    Args:
        command: the MPI launcher's.
        environment: of the launcher.
        output: shows what the ranks write, and collects the records of their failures.

    Returns:
        0; or the exit code of the rank that failed first, whose traceback has then been printed last; or 128 + N after
        signal N.
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
    """Return when the launcher has ended, or was made to; with the first signal that came and the time of it."""
    ended_by, when = 0, 0.0
    deadline, terminated = float("inf"), False
    while process.poll() is None:
        numbers = _turn(output, notices, _LOOK)[0]
        if output.broken and not ended_by:
            numbers = [signal.SIGPIPE]
        for number in numbers:
            if ended_by == number == signal.SIGINT:
                deadline, terminated = 0.0, True  # Ctrl-C for the second time: at once
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
    """Read what is left in the pipes, and show it; a signal ends this."""
    while True:
        sources, sinks = output.waiting()
        numbers, moved = _turn(output, notices, 0.0 if sources else _LOOK)
        if numbers or not (moved or (sinks and not sources)):
            return


def _turn(output: Output, notices: _Notices, seconds: float) -> tuple[list[int], bool]:
    """Wait for signals and output, at most so long; return the signals, and whether there was output to read."""
    numbers, readable, writable = notices(seconds, *output.waiting())
    output.turn(readable, writable)
    return numbers, bool(readable)


@contextlib.contextmanager
def _noticing() -> Iterator[_Notices]:
    """Give a function that waits, at most so many seconds, for signals, ended children and these file descriptors to
    read from and to write to; it returns the signals, and what is ready."""
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

    # What this process was started to ignore, it ignores: SIGHUP under nohup, SIGINT in the background of a script.
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
    """Become the parent of whatever the launcher leaves behind when it dies, so that it can be found (Linux)."""
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
    """What has a child told to end when this process is killed by kill -9 (Linux); looked up before the fork."""
    if sys.platform != "linux":
        return None
    control = ctypes.CDLL(None).prctl
    return lambda: control(_SET_PARENT_DEATH_SIGNAL, int(signal.SIGTERM), 0, 0, 0) and None


def _sweep(process: subprocess.Popen[bytes], mine: set[int]) -> None:
    """Give what is left of the job a moment to go, then kill it. Elsewhere than on Linux, ``rank.py`` does this for its
    rank."""
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
        time.sleep(0.02)  # processes that are nobody's children here cannot be waited for in another way
    if process.poll() is None:
        process.kill()
        process.wait()


def _descendants() -> Iterator[int]:
    """Every living process below this one (Linux; none elsewhere)."""
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
