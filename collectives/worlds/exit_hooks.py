"""The end of a rank: a failure is published to the peers and ends the job; a clean exit leaves no peer waiting.

Under plain ``mpirun`` a rank that raises, or calls ``sys.exit(3)``, hangs: it waits for its peers in ``MPI_Finalize``,
while they wait for it in a collective. `Hooks` therefore watch how this process ends.

    uncaught exception    the traceback is printed as always, recorded, and published to the peers; once they have
    or ``sys.exit(3)``    ended too, or after a bounded time, ``abort`` ends the job with the exit code
    exit code 0           ``leave`` tells the peers that this rank will call no further collective
    a forked child        nothing is touched: the child ends before any clean-up of MPI can run in it

Other ends (``os._exit``, a signal, ``raise SystemExit(3)`` without ``sys.exit``) are detected by ``collectivesrun``
from outside; such a ``SystemExit`` counts as a clean exit here. An exception that ends a thread does not end the
process, and is ignored.

This module does not depend on MPI: `Hooks` are given the functions that they call, and nothing changes before.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import socket
import stat
import sys
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from collectives.base.errors import how_explained, is_consequence
from collectives.base.tracebacks import hide_engine

RECORDS = "COLLECTIVES_RECORDS"
"""The variable by which ``collectivesrun`` names where a rank's failure record goes."""
_MOST_TEXT = 10_000
"""Most characters of a record's text, so that the record fits into a pipe."""
_PAUSE = 0.005


@dataclass(frozen=True, slots=True)
class Failure:
    """Why this process ends: its exit code, the text to show, and whether another rank's failure is the cause."""

    code: int
    text: str
    consequence: bool = False


class Hooks:
    """Watches how this process ends, so that its peers do not wait for it, until ``remove``, which is idempotent.

    Args:
        rank: this rank, for records and messages.
        abort: ends the whole job with an exit code, such as ``MPI.COMM_WORLD.Abort``. Called last.
        publish: sends the text of a failure to the peers, whose waits then raise ``RankFailedError``. Must not block.
        records: path of the failure record, normally ``os.environ.get(RECORDS)``; None: no record.
        all_left: whether all peers have called `leave` or died. That they know of the failure is not enough, because
            their programs may still handle it. Must not block.
        leave: tells the peers that this rank has gone, whatever its exit code. Must not block for long.
        full_tracebacks: whether tracebacks of this package's errors show its own frames.
        grace: seconds, at most, to wait until all have left (twice that for a rank that fails because another did).
    """

    def __init__(
        self,
        rank: int,
        abort: Callable[[int], None],
        publish: Callable[[str], None],
        records: str | None = None,
        *,
        all_left: Callable[[], bool] = lambda: True,
        leave: Callable[[], None] = lambda: None,
        full_tracebacks: bool = False,
        grace: float = 2.0,
    ) -> None:
        _guard_forked_children()
        self._rank, self._abort, self._publish, self._records = rank, abort, publish, records
        self._all_left, self._leave, self._grace = all_left, leave, grace
        self._watcher = _Watcher(self._on_failure, self._at_exit, full_tracebacks)

    def remove(self) -> None:
        """Remove the hooks; later hooks that have chained to them keep working, because removed hooks only pass on."""
        self._watcher.remove()

    def _on_failure(self, failure: Failure) -> None:
        """Record and publish the failure. The job is ended later, at exit."""
        if self._records:
            record(self._records, self._rank, failure)
        elif self._rank == 0 and (line := how_explained(failure.text)):
            # Once per job: rank 0 hears of every failure. A launcher that has the records says it itself.
            print(line, file=sys.stderr)
        with _reporting(self._rank, "telling the other ranks"):
            self._publish(failure.text)

    def _at_exit(self, failure: Failure | None) -> None:
        # The rank that failed first ends the job, so that its exit code is the job's; the others give it time.
        consequence = failure is not None and failure.consequence
        end = time.monotonic() + self._grace * (2 if consequence else 1)
        if failure is not None:
            _flush_logs()
        # Output is written first: once all ranks have left, the job may be ended at any moment.
        _flush_streams()
        _wait_until_read(self._records)
        with _reporting(self._rank, "leaving"):
            self._leave()
        if failure is None:
            return
        while time.monotonic() < end and (consequence or not self._alone()):
            time.sleep(_PAUSE)  # leaving is visible on the board only, which has to be polled
        self._abort(failure.code)

    def _alone(self) -> bool:
        alone = True
        with _reporting(self._rank, "waiting for the other ranks"):
            alone = self._all_left()
        return alone


def record(path: str, rank: int, failure: Failure) -> None:
    """Append a record, a line of JSON, to a file or to the pipe of ``collectivesrun``, if that is still read."""
    entry = {
        "rank": rank,
        "code": failure.code,
        "text": failure.text[-_MOST_TEXT:],
        "consequence": failure.consequence,
        "time": time.time(),
        "host": socket.gethostname(),
    }
    _write(path, json.dumps(entry).encode() + b"\n")


def tell_joined(path: str | None) -> None:
    """Tell ``collectivesrun``, by an empty line where records go, that this rank has joined others."""
    if path:
        _write(path, b"\n")


def _write(path: str, line: bytes) -> None:
    with contextlib.suppress(OSError):
        # A full pipe must not delay the program.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)


class _Watcher:
    """Calls ``on_failure`` when a failure is about to end this process, and ``at_exit`` when the interpreter exits.

    Chains to the hooks that it finds. In a forked child it only passes on.
    """

    def __init__(
        self,
        on_failure: Callable[[Failure], None],
        at_exit: Callable[[Failure | None], None],
        full_tracebacks: bool = True,
    ) -> None:
        self._on_failure, self._call_at_exit, self._full_tracebacks = on_failure, at_exit, full_tracebacks
        self._pid = os.getpid()
        self._failure: Failure | None = None
        self._previous_hook, self._previous_exit = sys.excepthook, sys.exit
        self._hook, self._exit = self._excepthook, self._sys_exit
        sys.excepthook, sys.exit = self._hook, self._exit
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Become inert, and restore the previous hooks unless later ones have chained to these."""
        self._pid = -1
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook
        if sys.exit == self._exit:
            sys.exit = self._previous_exit
        atexit.unregister(self._at_exit)
        # A thread keeps the hook under which it was started, which must not keep the world alive.
        self._on_failure = self._call_at_exit = lambda failure: None

    def _active(self) -> bool:
        """Whether an error ends the watched process, and does not return to a prompt."""
        return os.getpid() == self._pid and not hasattr(sys, "ps1") and not sys.flags.interactive

    def _excepthook(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        ends = self._active()
        if ends and not self._full_tracebacks:
            hide_engine(value)
            trace = value.__traceback__
        self._previous_hook(kind, value, trace)
        if ends:
            code = 130 if issubclass(kind, KeyboardInterrupt) else 1
            text = "".join(traceback.format_exception(kind, value, trace))
            self._fail(Failure(code, text, is_consequence(value)))

    def _sys_exit(self, status: Any = None, /) -> NoReturn:
        try:
            self._previous_exit(status)
        except SystemExit as leaving:
            failure = _failure_of(leaving.code)
            if failure is not None and self._active():
                leaving.__dict__["_collectives_catch_detector"] = _CatchDetector(failure, self._fail)
            raise

    def _fail(self, failure: Failure) -> None:
        if self._active():
            self._failure = failure
            self._on_failure(failure)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self._pid = -1
            self._call_at_exit(self._failure)


class _CatchDetector:
    """An attribute of a ``SystemExit`` that detects whether it was caught.

    The interpreter frees an uncaught exception when no Python frame is left, and the process ends. A caught one is
    freed, or kept, by the code that caught it.
    """

    __slots__ = ("_failure", "_tell")

    def __init__(self, failure: Failure, tell: Callable[[Failure], None]) -> None:
        self._failure, self._tell = failure, tell

    def __del__(self) -> None:
        if sys._getframe().f_back is None:
            self._tell(self._failure)


@functools.cache
def _guard_forked_children() -> None:
    """Make forked children end before MPI's clean-up can run in them.

    mpi4py finalises MPI at the end of the interpreter, in children too: there Open MPI hangs, and MPICH ends the whole
    job. Exit handlers that the child has registered still run; the parent's do not, as in ``multiprocessing``.
    """

    def end(failure: Failure | None) -> None:
        _flush_logs()
        _flush_streams()
        os._exit(0 if failure is None else failure.code)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: _Watcher(lambda failure: None, end))


def _failure_of(code: object) -> Failure | None:
    """The failure that ``SystemExit(code)`` means; None for success. A text means code 1, as for the interpreter."""
    if code is None or code == 0:
        return None
    number = code if isinstance(code, int) else 1
    shown = "" if isinstance(code, int) else f": {code}"
    # The system keeps the low byte only, so that a code whose low byte is 0 means success.
    return Failure(number & 0xFF, f"sys.exit({number}){shown}\n") if number & 0xFF else None


def _flush_logs() -> None:
    """Flush the handlers of ``logging``, if it is in use; an abrupt end would lose their records."""
    logging = sys.modules.get("logging")
    with contextlib.suppress(Exception):
        if logging is not None:
            logging.shutdown()


def _flush_streams() -> None:
    """Flush the standard streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _wait_until_read(records: str | None, seconds: float = 0.5) -> None:
    """Wait for a bounded time until the launcher has read all output: MPICH's drops it when a job is aborted."""
    end = time.monotonic() + seconds
    streams = [1, 2]
    with contextlib.ExitStack() as stack:
        if records:
            with contextlib.suppress(OSError):
                # ``collectivesrun`` reads an empty line once it has passed on everything before it.
                streams.append(os.open(records, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))
                stack.callback(os.close, streams[-1])
                os.write(streams[-1], b"\n")
        for stream in streams:
            with contextlib.suppress(OSError):
                while stat.S_ISFIFO(os.fstat(stream).st_mode) and time.monotonic() < end:
                    unread = int.from_bytes(fcntl.ioctl(stream, termios.FIONREAD, bytes(4)), sys.byteorder)
                    if not unread:
                        break
                    time.sleep(_PAUSE)  # a pipe does not notify its writer


@contextlib.contextmanager
def _reporting(rank: int, doing: str) -> Iterator[None]:
    """Print an error instead of raising it, so that the exit goes on."""
    try:
        yield
    except Exception:
        print(f"collectives: rank {rank} failed while {doing}:", file=sys.stderr)
        traceback.print_exc()
