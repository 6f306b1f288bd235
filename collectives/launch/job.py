"""One job from start to end: starts the MPI launcher, watches it and the ranks' records, and leaves no process behind.

An MPI launcher cannot be relied on to end: Open MPI's was seen to hang, deaf to SIGTERM, after a rank had died during start-up.
So once a rank has failed, or a signal has come, the launcher has a bounded time; then everything below this process is killed.
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

from collectives.launch import records

_LOOK = 0.25
"""Seconds between two looks at the run directory; the end of the launcher and signals are noticed at once."""
_AFTER_FAILURE = 6.0
_AFTER_SIGNAL = 5.0
_AFTER_TERMINATE = 1.5
_AFTER_END = 1.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SET_CHILD_SUBREAPER, _SET_PARENT_DEATH_SIGNAL = 36, 1


def run(command: Sequence[str], environment: Mapping[str, str], run_dir: Path) -> int:
    """Run the launcher's command to its end.

    Args:
        command: the MPI launcher's.
        environment: of the launcher.
        run_dir: where the ranks leave records of their failures.

    Returns:
        0; or the exit code of the rank that failed first, whose traceback has then been printed last; or 128 + N after signal N.
    """
    mine = set(_descendants())
    with _noticing() as notices, _adopting_orphans():
        process = subprocess.Popen(list(command), env=dict(environment), start_new_session=True, preexec_fn=die_with_parent())
        try:
            ended_by, when = _watch(process, notices, run_dir)
        finally:
            _sweep(process, mine)
    found = records.read(run_dir)
    if ended_by:
        found = [record for record in found if record.time < when]
    first = records.culprit(found)
    if first is not None:
        print(f"\n{first}", file=sys.stderr, flush=True)
        return first.code
    if ended_by:
        return 128 + ended_by
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _watch(process: subprocess.Popen[bytes], notices: Callable[[float], list[int]], run_dir: Path) -> tuple[int, float]:
    """Return when the launcher has ended, or was made to; with the first signal that came and the time of it."""
    ended_by, when = 0, 0.0
    deadline, terminated = float("inf"), False
    while process.poll() is None:
        for number in notices(_LOOK):
            if ended_by == number == signal.SIGINT:
                deadline, terminated = 0.0, True  # Ctrl-C for the second time: at once
            if not ended_by:
                ended_by, when = number, time.time()
                deadline = min(deadline, time.monotonic() + _AFTER_SIGNAL)
            process.send_signal(number)
        if deadline == float("inf") and any(run_dir.glob("*.json")):
            deadline = time.monotonic() + _AFTER_FAILURE
        if time.monotonic() > deadline:
            if terminated:
                break
            print("collectivesrun: the MPI launcher goes on although the job has ended; ending it", file=sys.stderr)
            process.terminate()
            deadline, terminated = time.monotonic() + _AFTER_TERMINATE, True
    return ended_by, when


@contextlib.contextmanager
def _noticing() -> Iterator[Callable[[float], list[int]]]:
    """Give a function that waits for signals and ended children, at most so many seconds, and returns the signals."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)

    def wait(seconds: float) -> list[int]:
        if select.select([wake], [], [], seconds)[0]:
            os.read(wake, 4096)
        taken = came[:]
        del came[: len(taken)]
        return taken

    before = {number: signal.signal(number, note) for number in _FORWARDED}
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
    """Give what is left of the job a moment to go, then kill it. Elsewhere than on Linux, ``rank.py`` does this for its rank."""
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
