"""A JSON file that several processes append to: an array that is well-formed after every write.

    [
    {"ph":"M",...},
    {"ph":"X",...}
    ]

A write locks the file and replaces the closing bracket by its lines and a new bracket, in one call. So the file is
valid JSON at any time, also after the program was killed; the next write truncates what an interrupted one has left. A
reader without the lock that meets a write, which takes some microseconds, may find its lines without the bracket, and
reads again. Where the file cannot be locked, lines are appended without a bracket, which traces may lack.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence

_END = b"\n]"
_SEARCHED = 64 << 10
"""Bytes at the end that are searched for the last whole line after a write that was interrupted."""


class TraceFile:
    """One process's access to the file. Calls must not overlap.

    Args:
        path: the file; other processes may append to it too.
        first: empty it; for one process, before the others open it.

    Raises:
        OSError: it cannot be opened for reading and writing.
    """

    def __init__(self, path: str | os.PathLike[str], first: bool) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if first else 0), 0o666)

    def add(self, lines: Sequence[str], patience: float, at_any_rate: bool = False) -> bool:
        """Append elements to the array. Returns whether they were appended.

        Args:
            patience: seconds to wait for a process that holds the lock.
            at_any_rate: whether to append without the lock then.

        Raises:
            OSError: the file cannot be written.
        """
        text = ",\n".join(lines).encode()
        with _locked(self._file, patience) as held:
            if held:
                self._replace_end(text)
                return True
        if held is None or at_any_rate:
            appending = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                _write_all(appending, (b"\n" if os.fstat(appending).st_size else b"[\n") + text + b",", None)
            finally:
                os.close(appending)
            return True
        return False

    def close(self) -> None:
        """Close the file; the array is well-formed already."""
        os.close(self._file)

    def _replace_end(self, text: bytes) -> None:
        file = self._file
        size = os.fstat(file).st_size
        tail = os.pread(file, len(_END), max(0, size - len(_END)))
        if size == 0:
            at, text = 0, b"[\n" + text
        elif tail == _END:
            at, text = size - len(_END), b",\n" + text
        else:
            begin = max(0, size - _SEARCHED)
            rest = os.pread(file, size - begin, begin)
            last = -1 if rest.endswith(b"},") else rest.rfind(b"},\n")  # appended without the lock, or cut off
            at = size if last < 0 else begin + last + 1
            text = (b"\n" if last < 0 else b",\n") + text
        _write_all(file, text + _END, at)
        if at + len(text) + len(_END) < size:
            os.ftruncate(file, at + len(text) + len(_END))


@contextlib.contextmanager
def _locked(file: int, patience: float) -> Iterator[bool | None]:
    """Hold the lock on a file. Yields whether it is held: False after ``patience`` seconds, None without file locks."""
    deadline = time.monotonic() + patience
    while (held := _try_lock(file)) is False and time.monotonic() < deadline:
        time.sleep(0.001)  # a blocking flock has no timeout
    try:
        yield held
    finally:
        if held:
            fcntl.flock(file, fcntl.LOCK_UN)


def _try_lock(file: int) -> bool | None:
    """True: locked; False: another process holds it; None: this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write_all(file: int, data: bytes, at: int | None) -> None:
    while data:
        written = os.write(file, data) if at is None else os.pwrite(file, data, at)
        data = data[written:]
        at = None if at is None else at + written
