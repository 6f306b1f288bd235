"""The timeline: what each rank did and when, as a trace for ui.perfetto.dev and chrome://tracing.

The file is in Chrome's JSON array format, one event a line, well-formed after every write (`trace_file`). A rank is a
process of the trace; a track is a thread of it. Hosts that share no file system have a file each; `read` also reads
their concatenation.

    X      a span on a track; spans on one track nest, or the track gets another lane
    b, e   a span outside the tracks, which may overlap others: the waiting time of a tensor
    i      a moment of the rank
    M      the names of ranks, tracks and tensors

Each tensor is a process too, a row, as in Horovod's timelines, whose readers expect these:

    B, E   the tensor's phases: ``NEGOTIATE_ALLREDUCE``, then ``ALLREDUCE``; on rank 0
    X      a tick, named by its number, for each rank that submits the tensor

Events are written by a thread of its own, about 20 ms after they were recorded.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
import socket
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.base.exclusion import exclusively
from collectives.base.logging import logger
from collectives.base.wake_up import WakeUp
from collectives.engine.trace_file import TraceFile

_PERIOD = 0.02
"""Seconds after which recorded events are written: a write of 64 KiB takes about 30 µs."""
_MOST_BYTES = 1 << 20
"""Bytes that may be unwritten; beyond, the recording thread writes them without waiting for the file's lock."""
_PATIENCE = 0.5
"""Seconds that opening and closing wait for the lock."""
_MOST_LANES = 200
_REMEMBERED_SPANS = 32
_EXCHANGES = 8
FIRST_ROW = 1 << 20
"""Processes of a trace from this id on are tensors, not ranks."""
_ROW_NUMBERS = 1 << 30
_MOST_ROWS = 10_000


class Timeline:
    """Records what one rank does. Methods may be called from any thread.

    A recording call takes a few microseconds and never raises: if the file can no longer be written, a warning is
    logged and the timeline is off.

    Args:
        path: the file. All ranks may name the same one.
        rank: of the process; the process id in the trace.
        host: shown after the rank.
        offset: seconds to add to this rank's clock to get rank 0's; see `align`.
        first: empty the file and begin it; for one rank, before the others open it.

    Raises:
        InvalidArgumentError: the file cannot be opened for writing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rank: int,
        *,
        host: str = "",
        offset: float = 0.0,
        first: bool = True,
    ) -> None:
        self._rank, self._offset = rank, offset
        self._path = os.fspath(path)
        self._lock, self._writing = threading.RLock(), threading.RLock()
        self._lines: list[str] = []
        self._waiting_bytes = 0
        self._tracks: dict[str, list[_Lane]] = {}
        self._lanes = 0
        self._async_spans = 0
        self._rows: dict[tuple[str, str], int] = {}
        self._due = WakeUp()
        begin = [self._name("process_name", 0, name=f"rank {rank} ({host})" if host else f"rank {rank}")]
        begin.append(self._name("process_sort_index", 0, sort_index=rank))
        try:
            self._file: TraceFile | None = TraceFile(path, first)
            self._file.add(begin, _PATIENCE, at_any_rate=True)
        except OSError as error:
            raise InvalidArgumentError(
                f"rank {rank}: the timeline {self._path!r} cannot be written: {error.strerror}; name another file [W57]"
            ) from error
        # Named like the engine's own threads, which count as threads that submit nothing.
        name = f"collectives rank {rank}: timeline"
        threading.Thread(target=_write_what_is_due, args=(weakref.ref(self), self._due), name=name, daemon=True).start()
        weakref.finalize(self, self._due.set)

    def span(self, track: str, name: str, begin: float, end: float, **args: object) -> None:
        """Record a span from ``begin`` to ``end``, in seconds of `time.monotonic`, on a named track.

        A span that overlaps an earlier one of its track without nesting goes to another lane. Beyond 200 lanes a rank's
        spans are recorded outside the tracks, like those of `async_span`.
        """
        self._record(self._add_span, track, name, *self._times(begin, end), args)

    def _add_span(self, track: str, name: str, start: int, stop: int, args: dict[str, object]) -> None:
        lane = self._lane(track, start, stop)
        if lane is None:
            self._add_async("more tracks", name, start, stop, {"track": track, **args})
        else:
            values = _values(args)
            self._add(
                f'{lane.head}"ts":{_us(start)},"dur":{_us(stop - start)},"name":{_quoted(name)},"args":{values}}}'
            )

    def async_span(self, category: str, name: str, begin: float, end: float, **args: object) -> None:
        """Record a span that may overlap any other, such as the negotiation of a tensor."""
        self._record(self._add_async, category, name, *self._times(begin, end), args)

    def mark(self, name: str, at: float, **args: object) -> None:
        """Record a moment of the rank, such as the beginning of a cycle."""
        where = f'"pid":{self._rank},"tid":0,"s":"p","ts":{_us(self._times(at, at)[0])}'
        self._record(self._add, f'{{"ph":"i",{where},"name":{_quoted(name)},"args":{_values(args)}}}')

    def phase(self, scope: str, row: str, name: str, begin: float, end: float, **args: object) -> None:
        """Record a phase of a tensor on its own row, such as ``ALLREDUCE``.

        Args:
            scope: distinguishes tensors of one name, as by the ranks of a process set.
            row: the tensor's name.
            begin, end: as for ``span``. Phases of one tensor nest or do not overlap.
        """
        start, stop = self._times(begin, end)
        begins = f'"ph":"B","tid":0,"ts":{_us(start)},"name":{_quoted(name)}'
        self._record(self._add_to_row, scope, row, begins, f'"ph":"E","tid":0,"ts":{_us(stop)},"args":{_values(args)}')

    def tick(self, scope: str, row: str, at: float) -> None:
        """Record on a tensor's row that this rank has submitted it."""
        stamp = _us(self._times(at, at)[0])
        self._record(self._add_to_row, scope, row, f'"ph":"X","tid":0,"ts":{stamp},"dur":0,"name":"{self._rank}"')

    def _add_to_row(self, scope: str, row: str, *events: str) -> None:
        pid = self._row(scope, row)
        if pid is not None:
            for event in events:
                self._add(f'{{"pid":{pid},{event}}}')

    def _row(self, scope: str, row: str) -> int | None:
        """The process id of a tensor's row, the same on all ranks; None beyond the largest number of rows."""
        key = (scope, row)
        pid = self._rows.get(key)
        if pid is None and len(self._rows) < _MOST_ROWS:
            pid = self._rows[key] = FIRST_ROW + zlib.crc32(f"{scope} {row}".encode(errors="replace")) % _ROW_NUMBERS
            self._add(self._name("process_name", 0, pid, name=row))
            self._add(self._name("process_sort_index", 0, pid, sort_index=FIRST_ROW + len(self._rows)))
        return pid

    def flush(self) -> None:
        """Write all recorded events now."""
        self._write(_PATIENCE)

    def close(self) -> None:
        """Write all recorded events and close the file. Later calls record nothing; closing again does nothing."""
        self._write(_PATIENCE, at_any_rate=True)
        exclusively(self._writing, exclusively, self._lock, self._close)
        self._due.set()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _times(self, begin: float, end: float) -> tuple[int, int]:
        """In whole nanoseconds of rank 0's clock, so that spans which touch do not overlap by rounding."""
        start = round((begin + self._offset) * 1e9)
        return start, max(start, round((end + self._offset) * 1e9))

    def _lane(self, track: str, start: int, stop: int) -> _Lane | None:
        lanes = self._tracks.get(track, ())
        for lane in lanes:
            if lane.takes(start, stop):
                return lane
        if self._lanes == _MOST_LANES:
            return None
        self._lanes += 1
        tid = self._lanes
        self._add(self._name("thread_name", tid, name=f"{track} ({len(lanes) + 1})" if lanes else track))
        self._add(self._name("thread_sort_index", tid, sort_index=tid))
        lane = _Lane(f'{{"ph":"X","pid":{self._rank},"tid":{tid},"cat":{_quoted(track)},', start, stop)
        self._tracks.setdefault(track, []).append(lane)
        return lane

    def _name(self, what: str, tid: int, pid: int | None = None, **args: object) -> str:
        pid = self._rank if pid is None else pid
        return f'{{"ph":"M","pid":{pid},"tid":{tid},"name":"{what}","args":{_values(args)}}}'

    def _add_async(self, category: str, name: str, start: int, stop: int, args: dict[str, object]) -> None:
        # Ids are one space for all processes of a trace.
        self._async_spans += 1
        number = f"0x{self._rank << 40 | self._async_spans:x}"
        common = f'"pid":{self._rank},"tid":0,"id":"{number}","cat":{_quoted(category)},"name":{_quoted(name)},"ts":'
        self._add(f'{{"ph":"b",{common}{_us(start)},"args":{_values(args)}}}')
        self._add(f'{{"ph":"e",{common}{_us(stop)}}}')

    def _add(self, line: str) -> None:
        if self._file is None:
            return
        self._lines.append(line)
        self._waiting_bytes += len(line)
        if not self._due.is_set():
            self._due.set()

    def _record(self, act: Callable[..., None], *arguments: Any) -> None:
        """Call what adds events, and write if too many are unwritten."""
        exclusively(self._lock, act, *arguments)
        if self._waiting_bytes >= _MOST_BYTES:
            self._write(0.0, at_any_rate=True)

    def _write(self, patience: float, at_any_rate: bool = False) -> None:
        exclusively(self._writing, self._write_lines, patience, at_any_rate)

    def _write_lines(self, patience: float, at_any_rate: bool) -> None:
        lines = exclusively(self._lock, self._taken)
        if self._file is None or not lines:
            return
        try:
            if not self._file.add(lines, patience, at_any_rate):
                exclusively(self._lock, self._put_back, lines)
        except OSError as error:
            logger.warning(
                "the timeline %r ends here, because it cannot be written: %s [W58]", self._path, error.strerror
            )
            self._file.close()
            self._file = None

    def _taken(self) -> list[str]:
        lines, self._lines, self._waiting_bytes = self._lines, [], 0
        return lines

    def _put_back(self, lines: list[str]) -> None:
        self._lines[:0] = lines
        self._waiting_bytes += sum(map(len, lines))
        self._due.set()


def _write_what_is_due(reference: weakref.ref[Timeline], due: WakeUp) -> None:
    """The writing thread of a timeline, which it does not keep alive."""
    while True:
        due.wait()
        time.sleep(_PERIOD)  # events recorded meanwhile are written together
        due.wait(0)
        recorder = reference()
        if recorder is None or recorder._file is None:
            return
        recorder.flush()
        del recorder


class _Lane:
    """One thread of the trace, on which spans nest or do not overlap; new spans are compared with the last few."""

    __slots__ = ("_latest", "_recent", "head")

    def __init__(self, head: str, start: int, stop: int) -> None:
        self.head = head
        self._latest = stop
        self._recent = deque([(start, stop)], maxlen=_REMEMBERED_SPANS)

    def takes(self, start: int, stop: int) -> bool:
        """Add the span if it fits. Returns whether it does."""
        if start < self._latest and any(a < start < b < stop or start < a < stop < b for a, b in self._recent):
            return False
        self._latest = max(self._latest, stop)
        self._recent.append((start, stop))
        return True


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the events of a trace. Tolerates a missing bracket and a trailing comma, and skips torn lines.

    Raises:
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    try:
        events = json.loads(text if text.endswith("]") else text.removesuffix(",") + "]")
    except (ValueError, RecursionError):
        events = _events_by_line(text)
    return [event for event in events if isinstance(event, dict)]


def align(exchange: Callable[[Any], Sequence[Any]], now: Callable[[], float] = time.monotonic) -> float:
    """The seconds to add to this rank's clock to get rank 0's. Every rank calls it at the same time.

    Ranks that share rank 0's clock get exactly 0. For others rank 0's clock is bounded from both sides, as in NTP: rank
    0 reads it after it left one exchange, hence after this rank had entered that one, and before this rank leaves the
    next one.

        this rank    entered k-1 .............................. left k
        rank 0                      left k-1   reads   enters k

    The bounds of all exchanges enclose the difference; the error of their middle is at most half their distance.

    Args:
        exchange: a collective that takes a value and returns those of all ranks, by rank.
        now: this rank's clock.
    """
    own = _clock_name()
    places = exchange(own)
    if all(place == places[0] for place in places):
        return 0.0
    least, most = float("-inf"), float("inf")
    entered = now()
    exchange(entered)
    for _ in range(_EXCHANGES):
        reading = now()
        at_rank_0 = exchange(reading)[0]
        least, most = max(least, at_rank_0 - now()), min(most, at_rank_0 - entered)
        entered = reading
    return 0.0 if own == places[0] else (least + most) / 2


def _clock_name() -> tuple[str, ...]:
    """Identifies the clock of `time.monotonic`: the host, its boot, and the time namespace of a container."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    return socket.gethostname(), boot, namespace


def _events_by_line(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            yield json.loads(line.strip().removesuffix(","))


def _us(nanoseconds: int) -> str:
    """Microseconds, exact to the nanosecond; a float would not be after some months of uptime."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


_quoted = json.encoder.encode_basestring_ascii


def _values(args: dict[str, object]) -> str:
    if not args:
        return "{}"
    try:
        return _encode(args)
    except (TypeError, ValueError):
        # JSON has no NaN or infinity, and only strings as keys.
        return _encode({key: str(value) for key, value in args.items()})


def _plain(value: object) -> object:
    """NumPy's integers as integers; anything else that JSON lacks as text."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return str(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain).encode
