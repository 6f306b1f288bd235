"""Show the ranks' output on a terminal, or in a pipe or file, as whole lines that are tagged with their rank.

Lines of two ranks never mix. An incomplete line (a prompt, a progress bar) is shown too:

    terminal    at once. When another rank writes, the incomplete line is erased and redrawn below. A line is tagged at
                its beginning, and where it is redrawn after a carriage return.
    pipe        after a second without further output. When another rank writes then, the line is broken.
    file        at the end of the line or of the job.

The beginning of a line longer than 16 MiB is shown at once in a pipe or file. Without tags, nothing is added at the end
of the job.

Nothing blocks: bytes are kept in ``pending`` until the job's loop finds that they can be written.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Hashable

_CONTROL = rb"\x1b\[[0-9;?]*[ -/]*[@-~]"
_MOVE = rb"\x1b\[[0-9;?]*[ -/]*[@-ln-~]"
_REDRAWN = re.compile(rb"(\r(?:" + _MOVE + rb")*)(?=[^\r\n\x1b]|\x1b\[[0-9;]*m)")
"""The beginning of a redrawn line, up to its first character or colour."""
_AT_START = re.compile(rb"\r(?:" + _MOVE + rb")*\Z")
_INVISIBLE = re.compile(_CONTROL + rb"|[\r\x00-\x1f]")
_IDLE = 1.0
"""Seconds after which an incomplete line is shown in a pipe; a rank's full buffer also ends in the middle of a line."""
_LONGEST = 16 << 20
"""Maximum bytes of an incomplete line that are withheld."""
_MOST_DRAWN = 64 << 10
"""Maximum bytes of an incomplete line that are redrawn on a terminal."""
_COLOURS = (b"36", b"33", b"32", b"35", b"34", b"31")
_PIECE = 4096
"""Maximum bytes of one write, which do not block a pipe that is ready."""


class Tags:
    """The tags before each line of a rank."""

    def __init__(self, ranks: int, wanted: bool) -> None:
        self._width = len(str(ranks - 1)) if wanted and ranks > 1 else 0

    @property
    def columns(self) -> int:
        """The columns that a tag takes."""
        return self._width and self._width + 3

    def of(self, rank: int, colour: bool) -> bytes:
        """Return ``[3] ``, in the rank's colour if ``colour``; empty without tags."""
        if not self._width:
            return b""
        tag = b"[%*d]" % (self._width, rank)
        return b"\x1b[%bm%b\x1b[0m " % (_COLOURS[rank % len(_COLOURS)], tag) if colour else tag + b" "


class Screen:
    """A file descriptor to which several streams are written."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.colour = os.isatty(fd) and "NO_COLOR" not in os.environ
        self.pending = bytearray()
        self.broken = False
        """Whether the reader is gone."""

    def feed(self, key: Hashable, tag: bytes, data: bytes) -> None:
        """Show data of the stream ``key``, each line after its tag."""
        raise NotImplementedError

    def settle(self, *, all_of_it: bool = False) -> None:
        """Show incomplete lines that have waited long enough, or all of them."""

    def write(self) -> None:
        """Write part of the pending bytes; call it when the file descriptor is ready."""
        try:
            del self.pending[: os.write(self.fd, self.pending[:_PIECE])]
        except BlockingIOError:
            return
        except OSError:
            self.broken = True
            self.pending.clear()

    def _show(self, data: bytes | bytearray) -> None:
        if not self.broken:
            self.pending += data


def size(fd: int) -> tuple[int, int]:
    """Return the lines and columns of a terminal."""
    columns, lines = os.get_terminal_size(fd)
    return lines or 24, columns or 80


class Terminal(Screen):
    """A terminal, whose last line may be the incomplete one of the stream that wrote last."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._rows: dict[Hashable, bytes] = {}
        """The incomplete line of each stream as drawn; the last one is on the screen."""

    def feed(self, key: Hashable, tag: bytes, data: bytes) -> None:
        drawn = next(reversed(self._rows), None)
        row = self._rows.pop(key, b"")
        if drawn is not None and drawn != key:
            self._show(self._erased(self._rows[drawn]))
        if drawn != key:
            self._show(row)
        text = _tagged(tag, data, row)
        self._show(text)
        row = (row + text).rpartition(b"\n")[2]
        if row:
            self._rows[key] = _last_drawing(row)[-_MOST_DRAWN:]
        elif self._rows:
            self._show(next(reversed(self._rows.values())))

    def settle(self, *, all_of_it: bool = False) -> None:
        if all_of_it and self._rows:
            row = self._rows.popitem()[1]
            if _INVISIBLE.sub(b"", row):
                self._show(b"\n")
            self._rows.clear()

    def _erased(self, row: bytes) -> bytes:
        width = len(_INVISIBLE.sub(b"", row).decode(errors="replace"))
        return b"\r\x1b[2K" if width < size(self.fd)[1] else b"\n"


class Stream(Screen):
    """A pipe or a file."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._held: dict[Hashable, tuple[bytearray, bytes, float]] = {}
        """By stream, the beginning of a line that is not shown yet, its tag, and its time of arrival."""
        self._patient = stat.S_ISREG(os.fstat(fd).st_mode)
        self._open: Hashable = None
        """The stream whose incomplete line is shown."""
        self._open_tag = b""

    def feed(self, key: Hashable, tag: bytes, data: bytes) -> None:
        held, _, since = self._held.pop(key, (bytearray(), tag, time.monotonic()))
        whole, end, rest = data.rpartition(b"\n")
        if end:
            self._begin(key, tag)
            self._show(bytes(held) + (whole + end).replace(b"\n", b"\n" + tag)[: -len(tag) or None])
            self._open = None
            held, since = bytearray(), time.monotonic()
        if rest and self._open == key:
            self._show(rest)
        elif held or rest:
            held += rest
            self._held[key] = held, tag, since
            if len(held) > _LONGEST:
                self._reveal(key)

    def settle(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        for key in [
            key for key, (_, _, since) in self._held.items() if all_of_it or (now - since > _IDLE and not self._patient)
        ]:
            self._reveal(key)
        if all_of_it and self._open is not None and self._open_tag:
            self._show(b"\n")
            self._open = None

    def _reveal(self, key: Hashable) -> None:
        text, tag, _ = self._held.pop(key)
        self._begin(key, tag)
        self._show(text)
        self._open, self._open_tag = key, tag

    def _begin(self, key: Hashable, tag: bytes) -> None:
        """Continue the incomplete line of this stream, or begin a new line."""
        if self._open != key:
            self._show((b"" if self._open is None else b"\n") + tag)


def _last_drawing(row: bytes) -> bytes:
    """Return the last visible drawing of a line that was redrawn after carriage returns."""
    cut = len(row)
    while (cut := row.rfind(b"\r", 0, cut)) >= 0:
        if _INVISIBLE.sub(b"", row[cut:]):
            return row[cut:]
    return row


def _tagged(tag: bytes, data: bytes, row: bytes) -> bytes:
    """Return data with a tag at the beginning of each line and after each carriage return; ``row`` precedes it."""
    if not tag:
        return data
    start = _AT_START.search(row)
    carried = start.group() if start else b""
    text = carried + data
    if b"\r" in text:
        text = _REDRAWN.sub(rb"\1" + tag.replace(b"\\", rb"\\"), text)
    text = text[len(carried) :].replace(b"\n", b"\n" + tag)
    return (b"" if row else tag) + (text[: -len(tag)] if data.endswith(b"\n") else text)
