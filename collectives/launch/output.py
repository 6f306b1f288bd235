"""Parse the launchers' output into the ranks' frames and the launcher's own messages, and show it.

    launchers' output -> frames -> a rank's stdout, stderr    shown, tagged with the rank
                                -> a rank's records           collected, to find the first failure
                                -> a rank's status            kept, for `collectives status`
                      -> anything else                        the launchers' own messages

A launcher is an MPI's, or the agent of one host.

Launchers print banners when ranks fail, which contain less than the records. So their messages are withheld for a
second, and dropped if a rank is known to have failed by then. Likewise the final traceback of a rank is removed from
its output: that of the first failure is shown last, and those that are consequences of it are dropped. ``verbose``
shows everything immediately.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Sequence

from collectives.launch.rank import MARK
from collectives.launch.records import ABORT_NOTICE, Record, Records
from collectives.launch.screen import Screen, Stream, Tags, Terminal, size
from collectives.launch.status import Statuses, listed

_FRAME = re.compile(rb"(.*?)" + MARK + rb"(\d+)([oerxs])(.*)", re.DOTALL)
_TRACEBACK = re.compile(rb"^Traceback \(most recent call last\):", re.MULTILINE)
_CONSEQUENCE = re.compile(rb"^collectives\.(RankFailedError|CollectiveTimeoutError)\b", re.MULTILINE)
_PREFIX = re.compile(rb"(?:\w+ \w+ +\d+ [\d:]+ \d+)?(?:\[[^]]*\])+(?:<std\w+>)?:? ?")
"""What launchers can put before each line: ``[1,0]<stderr>: `` (Open MPI), ``[0] `` (MPICH), perhaps with the time."""
_CONTROL = re.compile(rb"\x1b\[[0-9;]*m")
_HOLD = 1.0
"""Seconds for which a traceback or the launcher's messages are withheld, as part of the job's end."""
_MOST_PENDING = 1 << 20
_READ = 64 << 10


class Output:
    """Reads the launcher's output, shows the ranks' output and collects their records.

    Args:
        targets: file descriptors for the ranks' stdout and stderr.
    """

    def __init__(self, ranks: int, *, tag: bool = True, verbose: bool = False, targets: Sequence[int] = (1, 2)) -> None:
        self.records = Records()
        self.statuses = Statuses(ranks)
        self.interrupted = False
        """Whether this process ends the job, so that the launcher's messages are dropped."""
        self._tags, self._verbose = Tags(ranks, tag), verbose
        out, err = (_screen(fd) for fd in targets)
        self._terminals = [str(number) for number, screen in ((1, out), (2, err)) if isinstance(screen, Terminal)]
        self._screens = {b"o": out, b"e": out if _same(*targets) else err}
        self._sources: dict[int, bytes] = {}
        """The incomplete last line of each of the launcher's outputs, by file descriptor."""
        self._names: dict[int, str] = {}
        self._held: dict[int, tuple[float, list[tuple[bytes, bytes]]]] = {}
        """By rank, when a possibly final traceback began, and the output since then."""
        self._withheld: dict[int, bytes] = {}
        """The final tracebacks of ranks."""
        self._words: list[tuple[int, bytes]] = []
        """The launcher's withheld lines, each with its source."""
        self._words_since = 0.0

    @property
    def terminal(self) -> str:
        """The argument ``terminal`` of ``collectives.launch.rank``, narrower by the columns of the tag."""
        if not self._terminals:
            return ""
        lines, columns = size(next(screen.fd for screen in self._screens.values() if isinstance(screen, Terminal)))
        return " ".join([str(lines), str(max(20, columns - self._tags.columns)), *self._terminals])

    @property
    def broken(self) -> bool:
        """Whether the reader of an output is gone."""
        return any(screen.broken for screen in self._screens.values())

    def attach(self, *sources: int, name: str = "") -> None:
        """Add file descriptors to read from; lines that are not ranks' are shown after the name of their host."""
        for source in sources:
            os.set_blocking(source, False)
            self._sources[source] = b""
            self._names[source] = name

    def waiting(self) -> tuple[list[int], list[int]]:
        """Return the file descriptors to wait for: to read from, and to write to."""
        pending = {screen.fd: screen for screen in self._screens.values() if screen.pending}
        full = any(len(screen.pending) > _MOST_PENDING for screen in pending.values())
        return [] if full else list(self._sources), list(pending)

    def detach(self, source: int) -> None:
        """Read all that a source has, and no more."""
        while source in self._sources and self._read(source):
            pass
        if source in self._sources:
            self._end_of(source)

    def take_words(self, source: int) -> str:
        """Read all that a source has, and take out the withheld lines that are not ranks'."""
        while source in self._sources and self._read(source):
            pass
        lines = [line for origin, line in self._words if origin == source]
        self._words = [entry for entry in self._words if entry[0] != source]
        return b"\n".join(lines).decode(errors="replace").strip()

    def turn(self, readable: Collection[int], writable: Collection[int]) -> None:
        """Read and write where possible, and show what has been withheld long enough."""
        for source in readable:
            self._read(source)
        now = time.monotonic()
        for rank in [rank for rank, (since, _) in self._held.items() if now - since > _HOLD]:
            self._release(rank)
        if self._words and not self.records and not self.interrupted and now - self._words_since > _HOLD:
            self._say()
        for screen in {id(screen): screen for screen in self._screens.values()}.values():
            screen.settle()
            if screen.fd in writable:
                screen.write()

    def end(self, first: Record | None) -> None:
        """Show the remaining output at the end of the job, last the first failure. Nothing is read after this."""
        for source in list(self._sources):
            self._end_of(source)
        if first is None and not self.interrupted:
            self._say()
        for rank in list(self._held):
            # The traceback of a rank that was killed before it could write its record shows a consequence.
            if first is not None and any(
                _CONSEQUENCE.search(data) for kind, data in self._held[rank][1] if kind == b"e"
            ):
                self._withhold(rank, "")
            else:
                self._release(rank)
        interrupted = self._interrupted()
        for rank in interrupted[1:]:
            del self._withheld[rank]
        others = {record.rank for record in self.records.per_rank() if record.consequence}
        others |= {rank for rank, text in self._withheld.items() if _CONSEQUENCE.search(text)}
        for rank, text in self._withheld.items():
            if rank not in others and (first is None or rank != first.rank):
                self._feed(rank, b"e", text)
        for screen in self._screens.values():
            screen.settle(all_of_it=True)
        if interrupted[1:]:
            self.say(f"interrupted along with rank {interrupted[0]}: {listed(interrupted[1:])} (--verbose shows where)")
        hidden = sorted(rank for rank in self._withheld if rank in others and (first is None or rank != first.rank))
        if first is not None:
            also = (
                f"collectivesrun: {listed(hidden)} failed as a consequence of the failure below (--verbose shows how)\n"
                if hidden
                else ""
            )
            said = "\n".join(filter(None, [f"\n{also}{first}", first.how_explained()]))
            self._screens[b"e"].feed(None, b"", f"{said}\n".encode(errors="backslashreplace"))

    def _interrupted(self) -> list[int]:
        """Return the ranks whose final traceback shows where this process's interrupt has reached them."""
        if not self.interrupted:
            return []
        return sorted(rank for rank, text in self._withheld.items() if text.rstrip().endswith(b"\nKeyboardInterrupt"))

    def say(self, text: str) -> None:
        """Show a message of ``collectivesrun``."""
        self._screens[b"e"].feed(None, b"", f"collectivesrun: {text}\n".encode())

    def _read(self, source: int) -> bool:
        """Read once; returns whether there may be more."""
        try:
            data = os.read(source, _READ)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._end_of(source)
            return False
        *lines, self._sources[source] = (self._sources[source] + data).split(b"\n")
        self._take_lines(source, lines)
        return True

    def _end_of(self, source: int) -> None:
        """Process the end of a source, whose last line may lack the line feed."""
        rest = self._sources.pop(source)
        self._take_lines(source, [rest] if rest else [])

    def _take_lines(self, source: int, lines: Sequence[bytes]) -> None:
        gathered: list[tuple[int, bytes, list[bytes]]] = []
        for line in lines:
            frame = _FRAME.fullmatch(line)
            if frame is None:
                self._launchers(source, line)
                continue
            words = frame[1].strip(b"\0")
            if words and not _PREFIX.fullmatch(words):
                self._launchers(source, words)  # Open MPI's last message has no line feed
            rank, kind = int(frame[2]), frame[3]
            text = frame[4].replace(MARK + b"n", b"\n").replace(MARK + b"p", MARK)
            if gathered and gathered[-1][:2] == (rank, kind):
                gathered[-1][2].append(text)
            else:
                gathered.append((rank, kind, [text]))
        for rank, kind, parts in gathered:
            self._take(rank, kind, b"".join(parts))

    def _launchers(self, source: int, line: bytes) -> None:
        """Process a line of the launcher's own."""
        if not self._words:
            self._words_since = time.monotonic()
        self._words.append((source, line))
        if self._verbose:
            self._say()

    def _say(self) -> None:
        for source, line in self._words:
            name = self._names[source]
            self._screens[b"e"].feed(None, b"", (f"{name}: ".encode() if name else b"") + line + b"\n")
        self._words.clear()

    def _take(self, rank: int, kind: bytes, data: bytes) -> None:
        if kind == b"s":
            self.statuses.add(rank, data)
            return
        if kind in b"rx":
            record = self.records.add(rank, data, inside=kind == b"r")
            if record is not None and rank in self._held and rank not in self._withheld:
                self._withhold(rank, record.text)
            return
        if kind == b"e":
            self.records.hear(rank, data)
            if b"application called MPI_Abort" in data and not self._verbose:
                data = ABORT_NOTICE.sub(b"", data)
        if self._verbose:
            self._feed(rank, kind, data)
        elif rank in self._held:
            self._held[rank][1].append((kind, data))
        elif kind == b"e" and (begin := _TRACEBACK.search(data)):
            self._feed(rank, kind, data[: begin.start()])
            self._held[rank] = time.monotonic(), [(kind, data[begin.start() :])]
        else:
            self._feed(rank, kind, data)

    def _withhold(self, rank: int, text: str) -> None:
        """Move a rank's final traceback out of its withheld output; without ``text`` that is all of its stderr."""
        held = self._held.pop(rank)[1]
        errors = b"".join(data for kind, data in held if kind == b"e")
        wanted = text.encode(errors="backslashreplace").strip() if text else errors  # as Python writes it to stderr
        before, traceback, after = _CONTROL.sub(b"", errors).partition(wanted)
        if traceback:
            self._withheld[rank] = traceback if traceback.endswith(b"\n") else traceback + b"\n"
            held = [(kind, data) for kind, data in held if kind != b"e"] + [(b"e", before + after.lstrip(b"\n"))]
        for kind, data in held:
            self._feed(rank, kind, data)

    def _release(self, rank: int) -> None:
        for kind, data in self._held.pop(rank)[1]:
            self._feed(rank, kind, data)

    def _feed(self, rank: int, kind: bytes, data: bytes) -> None:
        if data:
            screen = self._screens[kind]
            screen.feed((rank, kind), self._tags.of(rank, screen.colour), data)


def _screen(fd: int) -> Screen:
    with contextlib.suppress(OSError):
        if os.isatty(fd):
            return Terminal(fd)
    return Stream(fd)


def _same(one: int, other: int) -> bool:
    """Whether two file descriptors refer to the same file."""
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False
