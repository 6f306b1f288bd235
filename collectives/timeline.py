"""The timeline: what each rank did and when, as a trace that ui.perfetto.dev and chrome://tracing open.

The file is Chrome's JSON array format, one event a line. A rank is a process of the trace; a track is a thread of it.

    [
    {"ph":"M","pid":0,"tid":0,"name":"process_name","args":{"name":"rank 0 (host)"}},
    {"ph":"X","pid":0,"tid":1,"ts":12.500,"dur":3.250,"cat":"engine","name":"pack","args":{"bytes":4096}},

There is never a closing bracket: all ranks append to one file, none of them knows that it is the last, and the format allows it to be
missing. So the file is whole after every write, also if the program is killed; what is lost then is what was recorded since the last
write, half a second at most while events keep coming.

A write is whole lines in one ``os.write`` to a file opened for appending: on a local file system lines of different ranks cannot
tear. NFS does not append atomically, so a write also takes a lock on the file, and puts itself off if another rank has it.
Hosts that share no file system get a file each; ``cat`` of them is a trace again.

    X      a span on a track; spans on one track nest, or the track gets another lane
    b, e   a span beside the tracks; these may overlap: the waiting times of tensors
    i      a mark at one moment of the rank
    M      the names of ranks and tracks
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import operator
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from collectives.errors import InvalidArgumentError

_PERIOD = 0.5
"""Seconds after which an event that is recorded takes all before it to the file."""
_BATCH = 64 << 10
"""Bytes after which they are written anyway: a write of this size takes some 30 µs."""
_MOST_BYTES = 1 << 20
"""Bytes that may wait for another rank to leave the file; then they are written without the lock."""
_PATIENCE = 0.5
"""Seconds that opening and closing wait for the lock."""
_MOST_LANES = 200
_REMEMBERED_SPANS = 32
_ROUNDS = 8

_log = logging.getLogger("collectives")


class Timeline:
    """Records what one rank does; calls may come from several threads.

    A recording call takes a few microseconds and never raises: if the file cannot be written any more, a warning is logged and
    the timeline is off.

    Args:
        path: the file. All ranks may name the same one.
        rank: of the process; the process id in the trace.
        host: shown behind the rank.
        offset: what to add to this rank's clock to get rank 0's, in seconds; see ``align``.
        first: empty the file and begin it. One rank does, before the others open it.
        now: the clock that says when to write.

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
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._offset, self._now = rank, offset, now
        self._path = os.fspath(path)
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._waiting_bytes = 0
        self._tracks: dict[str, list[_Lane]] = {}
        self._lanes = 0
        self._async_spans = 0
        try:
            self._file: int | None = _open(path, first)
        except OSError as error:
            raise InvalidArgumentError(f"rank {rank}: the timeline {self._path!r} cannot be written: {error.strerror}") from error
        self._written = now()
        with self._lock:
            self._add(self._name("process_name", 0, name=f"rank {rank} ({host})" if host else f"rank {rank}"))
            self._add(self._name("process_sort_index", 0, sort_index=rank))

    def span(self, track: str, name: str, begin: float, end: float, **args: object) -> None:
        """Record what lasted from ``begin`` to ``end``, in seconds of ``time.monotonic``, on a named track.

        A span that overlaps an earlier one of its track without nesting goes to another lane of it. Beyond 200 lanes a rank's spans
        are recorded beside the tracks, like those of ``async_span``.
        """
        values = _values(args)
        with self._lock:
            start, stop = self._times(begin, end)
            lane = self._lane(track, start, stop)
            if lane is None:
                self._add_async("more tracks", name, start, stop, _values({"track": track, **args}))
            else:
                self._add(f'{lane.head}"ts":{_us(start)},"dur":{_us(stop - start)},"name":{_quoted(name)},"args":{values}}},\n')

    def async_span(self, category: str, name: str, begin: float, end: float, **args: object) -> None:
        """Record what lasted from ``begin`` to ``end`` and may overlap anything, such as a tensor that waits to be agreed on."""
        values = _values(args)
        with self._lock:
            self._add_async(category, name, *self._times(begin, end), values)

    def mark(self, name: str, at: float, **args: object) -> None:
        """Record a moment of the rank, such as the begin of a cycle."""
        values = _values(args)
        with self._lock:
            stamp = _us(self._times(at, at)[0])
            self._add(f'{{"ph":"i","pid":{self._rank},"tid":0,"s":"p","ts":{stamp},"name":{_quoted(name)},"args":{values}}},\n')

    def flush(self) -> None:
        """Write what was recorded; for a caller that expects to be idle for a while."""
        with self._lock:
            self._write(_PATIENCE)

    def close(self) -> None:
        """Write what was recorded and close the file. Later calls record nothing; closing again does nothing."""
        with self._lock:
            self._write(_PATIENCE)
            if self._file is not None:
                os.close(self._file)
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

    def _name(self, what: str, tid: int, **args: object) -> str:
        return f'{{"ph":"M","pid":{self._rank},"tid":{tid},"name":"{what}","args":{_values(args)}}},\n'

    def _add_async(self, category: str, name: str, start: int, stop: int, values: str) -> None:
        # Ids are one space for all processes of a trace.
        self._async_spans += 1
        number = f"0x{self._rank << 40 | self._async_spans:x}"
        common = f'"pid":{self._rank},"tid":0,"id":"{number}","cat":{_quoted(category)},"name":{_quoted(name)},"ts":'
        self._add(f'{{"ph":"b",{common}{_us(start)},"args":{values}}},\n{{"ph":"e",{common}{_us(stop)}}},\n')

    def _add(self, lines: str) -> None:
        if self._file is None:
            return
        self._lines.append(lines)
        self._waiting_bytes += len(lines)
        if self._waiting_bytes >= _BATCH or self._now() - self._written >= _PERIOD:
            self._write(0.0)

    def _write(self, patience: float) -> None:
        if self._file is None or not self._lines:
            return
        try:
            with _locked(self._file, patience) as alone:
                if not alone and not patience and self._waiting_bytes < _MOST_BYTES:
                    return
                _write_all(self._file, "".join(self._lines).encode())
        except OSError as error:
            _log.warning("the timeline %r ends here, it cannot be written: %s", self._path, error.strerror)
            os.close(self._file)
            self._file = None
        self._lines.clear()
        self._waiting_bytes = 0
        self._written = self._now()


class _Lane:
    """One thread of the trace: spans on it nest or do not overlap. The last few are remembered, to compare new ones with."""

    __slots__ = ("_latest", "_recent", "head")

    def __init__(self, head: str, start: int, stop: int) -> None:
        self.head = head
        self._latest = stop
        self._recent = deque([(start, stop)], maxlen=_REMEMBERED_SPANS)

    def takes(self, start: int, stop: int) -> bool:
        """Whether the span fits; if so, it is taken."""
        if start < self._latest and any(a < start < b < stop or start < a < stop < b for a, b in self._recent):
            return False
        self._latest = max(self._latest, stop)
        self._recent.append((start, stop))
        return True


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the events of a trace; tolerates a missing bracket, a comma at the end, and lines that are torn, which are left out.

    Raises:
        OSError: the file cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace").strip()
    try:
        found = json.loads(text if text.endswith("]") else text.removesuffix(",") + "]")
    except ValueError:
        found = _events_by_line(text)
    return [event for event in found if isinstance(event, dict)]


def align(exchange: Callable[[Any], Sequence[Any]], now: Callable[[], float] = time.monotonic) -> float:
    """Find what to add to this rank's clock to get rank 0's, in seconds. Every rank calls it at the same time.

    Ranks that share rank 0's clock get exactly 0. For others rank 0's clock is bounded from both sides, as in NTP: rank 0 reads it
    after it left one exchange, hence after this rank had entered that one, and before this rank leaves the next.

        this rank    entered k-1 .............................. left k
        rank 0                      left k-1   reads   enters k

    The bounds of all rounds together hold the difference; their middle is wrong by half their distance at most.

    Args:
        exchange: a collective; takes a value and returns those of all ranks by rank, once all have given theirs.
        now: this rank's clock.
    """
    own = _clock_name()
    places = exchange(own)
    if all(place == places[0] for place in places):
        return 0.0
    least, most = float("-inf"), float("inf")
    entered = now()
    exchange(entered)
    for _ in range(_ROUNDS):
        reading = now()
        at_rank_0 = exchange(reading)[0]
        least, most = max(least, at_rank_0 - now()), min(most, at_rank_0 - entered)
        entered = reading
    return 0.0 if own == places[0] else (least + most) / 2


def _clock_name() -> tuple[str, ...]:
    """What names the clock behind ``time.monotonic``: the host, its boot, and the time namespace of a container."""
    boot = namespace = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    return socket.gethostname(), boot, namespace


def _open(path: str | os.PathLike[str], first: bool) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if first else 0), 0o666)
    try:
        with _locked(file, _PATIENCE):
            # Also where the first rank's file is out of sight: a host without a shared file system begins its own.
            if os.fstat(file).st_size == 0:
                _write_all(file, b"[\n")
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def _locked(file: int, patience: float) -> Iterator[bool]:
    """Hold the lock on a file, and say whether it is held: not if others keep it for so long, or if there are no locks here."""
    deadline = time.monotonic() + patience
    while not (held := _try_lock(file)) and time.monotonic() < deadline:
        time.sleep(0.001)  # a lock that is waited for in the system's own way cannot be given up in time
    try:
        yield held is not False
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


def _try_lock(file: int) -> bool | None:
    """True: locked; False: another has it; None: this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _events_by_line(text: str) -> Iterator[Any]:
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            yield json.loads(line.strip().removesuffix(","))


def _us(nanoseconds: int) -> str:
    """Microseconds to the last nanosecond; a float would lose it after some months of uptime."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


_quoted = json.encoder.encode_basestring_ascii


def _values(args: dict[str, object]) -> str:
    if not args:
        return "{}"
    try:
        return _encode(args)
    except (TypeError, ValueError):
        # NaN and infinity are no JSON; neither is a dictionary with odd keys.
        return _encode({key: str(value) for key, value in args.items()})


def _plain(value: object) -> object:
    """NumPy's integers as integers; what JSON has no word for as text."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return str(value)


_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain).encode
