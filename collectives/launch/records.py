"""Collect the ranks' failure records, and find the first failure among its consequences.

There are two kinds of records: from inside the rank (``collectives.worlds.exit_hooks``: exact time, whole traceback),
and from outside (``collectives.launch.rank``: any way to end), where the reason is the rank's last output on stderr.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from collectives.base.errors import how_explained

_TRACEBACK = "Traceback (most recent call last):"
_OF_ANOTHER = re.compile(r"^\S*RankFailedError: rank \d+: rank \d+ has failed(?: \[\w+\])?:$", re.MULTILINE)
"""What precedes the traceback of another rank, which may be one of another launcher."""
ABORT_NOTICE = re.compile(rb"^Abort\(\d+\) on node .*application called MPI_Abort.*\n?", re.MULTILINE)
"""MPICH's message, written by the rank, when it aborts the job after its failure."""
_TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank that its batch system or an MPI has ended, past its ``rank.py``."""
_SHOWN_LINES = 20
_KEPT = 32 << 10
"""Bytes of each rank's stderr that are kept."""
_TRUSTED = 1.0
"""Seconds by which a host's clock may differ from this one's; beyond, the time of a record's arrival counts."""


@dataclass(frozen=True, slots=True)
class Record:
    """The failure of one rank.

    Attributes:
        consequence: caused by another rank's failure.
        lost: seen by the launcher only, which has lost the host; ``text`` is the message.
        ended: when the rank's launcher told it to end, if it did.
    """

    rank: int
    code: int
    text: str
    time: float
    host: str
    consequence: bool = False
    lost: bool = False
    ended: float = float("inf")

    def __str__(self) -> str:
        if self.lost:
            return f"collectivesrun: {self.text}"
        if self.code > 128 and self.code - 128 in set(signal.Signals):
            how = f"was killed by signal {self.code - 128} ({signal.Signals(self.code - 128).name}) [L8]"
        else:
            how = f"failed with exit code {self.code} [L9]"
        another = _OF_ANOTHER.search(self.text) if self.consequence else None
        shown = self.text[another.start() :].strip() if another else _last_words(self.text)
        return f"collectivesrun: rank {self.rank} on {self.host} {how}" + (f":\n{shown}" if shown else "")

    def how_explained(self) -> str:
        """A line that names the command which explains or cures this failure; empty if no message of this package ended
        it."""
        whole = str(self)
        head, _, shown = whole.partition(":\n")
        if shown.endswith("ModuleNotFoundError: No module named 'horovod'"):
            return "To run a Horovod script unchanged: collectivesrun --as-horovod"
        if self.lost:
            return how_explained(whole)
        killed = self.code > 128 and _TRACEBACK not in shown
        return how_explained(head if killed or not shown else shown)


class Records:
    """The records of a job, as they arrive, and the end of each rank's stderr.

    Attributes:
        joined: whether any rank has joined others, by ``init()`` or a backend of torch.distributed.
        first_done: of the rank that was the first to end with exit code 0.
    """

    def __init__(self) -> None:
        self.joined = False
        self.first_done: Record | None = None
        self._joined: set[int] = set()
        self._done: set[int] = set()
        self._records: dict[tuple[int, bool], Record] = {}
        self._rests: dict[tuple[int, bool], bytes] = {}
        self._heard: dict[int, bytes] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    def hear(self, rank: int, data: bytes) -> None:
        """Keep the end of a rank's stderr."""
        self._heard[rank] = (self._heard.get(rank, b"") + data)[-_KEPT:]

    def add(self, rank: int, data: bytes, *, inside: bool) -> Record | None:
        """Add data of a rank's records, lines of JSON. Returns the first failure of each kind, once complete."""
        self.joined = self.joined or inside
        if inside:
            self._joined.add(rank)
        *lines, self._rests[rank, inside] = (self._rests.get((rank, inside), b"") + data).split(b"\n")
        for line in lines:
            record = parse(line)
            if record is not None and not record.code:
                self._done.add(rank)
                self.first_done = min(filter(None, [self.first_done, record]), key=lambda one: one.time)
            elif record is not None and (rank, inside) not in self._records:
                self._records[rank, inside] = record
                return record
        return None

    def ranks(self) -> set[int]:
        """Return the ranks that have failed."""
        return {rank for rank, _ in self._records}

    def cut_short(self) -> set[int]:
        """Return the ranks that have joined others and told of no end: killed with the process that tells it."""
        return self._joined - self._done - self.ranks()

    def per_rank(self) -> list[Record]:
        """Return one record per rank; its own takes precedence over that from outside.

        What a rank came to after its launcher had told it to end is a consequence, whatever it says.
        """
        best = {rank: record for (rank, inside), record in sorted(self._records.items(), key=lambda item: item[0][1])}
        for rank, record in best.items():
            outside = self._records.get((rank, False))
            if outside is not None and outside.ended <= record.time:
                best[rank] = replace(record, consequence=True)
        # Without a traceback in the record, the reason is on stderr.
        said = {rank: record.text if _TRACEBACK in record.text else self._said(rank) for rank, record in best.items()}
        return [replace(record, text=said[rank] or record.text) for rank, record in best.items()]

    def _said(self, rank: int) -> str:
        return ABORT_NOTICE.sub(b"", self._heard.get(rank, b"")).decode(errors="replace").strip()


def parse(line: bytes) -> Record | None:
    """Parse a record that has just arrived; None if it is invalid."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        record = Record(**json.loads(line))
        if {type(record.rank), type(record.code)} != {int}:
            return None
        now = time.time()
        if record.host == socket.gethostname() or abs(record.time - now) < _TRUSTED:
            return record
        return replace(record, time=now, ended=record.ended + now - record.time)
    return None


def culprit(records: Iterable[Record]) -> Record | None:
    """Return the first failure that is not a consequence of another one, or else the first of all; None without any.

    So where a rank left without a word, the first that missed it counts, and not those that were ended for that.
    """
    return min(
        records, key=lambda record: (record.consequence or record.code == _TERMINATED, record.time), default=None
    )


def _last_words(text: str) -> str:
    """Return the last traceback and all text after it, or else the last lines."""
    start = text.rfind(_TRACEBACK)
    if start >= 0:
        # Chained exceptions ("During handling of ...") belong together.
        chained = ("During handling of the above exception", "The above exception was the direct cause")
        while start > 0 and text[:start].rstrip().endswith(("another exception occurred:", "the following exception:")):
            earlier = text.rfind(_TRACEBACK, 0, start)
            if earlier < 0 or not any(word in text[earlier:start] for word in chained):
                break
            start = earlier
        return text[start:].strip()
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
