"""What failed first: reads the records that ranks leave in the run directory, and tells the cause from its consequences.

Two kinds of record: ``rank-N.json`` from inside the rank (``collectives.exits``: exact time, whole traceback), and
``end-N.json`` from outside (``collectives.launch.rank``: any way to end), with the last of the rank's stderr in ``stderr-N``.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):"
_ABORT_NOTICE = re.compile(r"^Abort\(\d+\) on node .*application called MPI_Abort.*", re.MULTILINE | re.DOTALL)
"""What MPICH writes, as the rank, when the rank ends the job after its failure."""
_ENDED_BY_OTHERS = 128 + signal.SIGTERM
_SHOWN_LINES = 20


@dataclass(frozen=True, slots=True)
class Record:
    """How one rank failed. ``consequence``: because another rank had failed before."""

    rank: int
    code: int
    text: str
    time: float
    host: str
    consequence: bool = False

    def __str__(self) -> str:
        if self.code > 128 and self.code - 128 in set(signal.Signals):
            how = f"was killed by signal {self.code - 128} ({signal.Signals(self.code - 128).name})"
        else:
            how = f"failed with exit code {self.code}"
        shown = _last_words(self.text)
        return f"collectivesrun: rank {self.rank} on {self.host} {how}" + (f":\n{shown}" if shown else "")


def read(run_dir: Path) -> list[Record]:
    """Read all records, one per rank; what the rank itself wrote comes before what was seen from outside."""
    found: dict[int, Record] = {}
    for kind in ("end", "rank"):
        for path in run_dir.glob(f"{kind}-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                record = Record(**json.loads(path.read_text(encoding="utf-8")))
                if _TRACEBACK not in record.text:
                    # The reason, if there is one, stands on stderr.
                    record = replace(record, text=_stderr(run_dir, record.rank) or record.text)
                found[record.rank] = record
    return list(found.values())


def _stderr(run_dir: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        text = (run_dir / f"stderr-{rank}").read_text(encoding="utf-8", errors="replace")
        return _ABORT_NOTICE.sub("", text).strip()
    return ""


def culprit(records: Iterable[Record]) -> Record | None:
    """The rank that failed first, of those that did not fail because of another; None without records."""
    return min(records, key=lambda record: (record.consequence, record.code == _ENDED_BY_OTHERS, record.time), default=None)


def _last_words(text: str) -> str:
    """The last traceback with what was written after it, or the last lines."""
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
