"""What the ranks of a job do, and who is late: from the lines that each says twice a second of itself.

    rank: collectives.worlds.status -> rank.py, a frame -> Output -> Statuses -> `collectives status`, the page
                                    -> a file, without ``collectivesrun`` -> `by_others` -> `collectives status`

A rank that waits names the ranks that are missing; what those do is in their own lines, or in the age of the last one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from collectives.base.user_folder import OF_RANKS, user_folder

WAITS_FROM = 0.5
"""Seconds from which a rank counts as waiting: shorter waits are part of every step."""
_MOST_LINE = 64 << 10
SILENT_FROM = 2.0
"""Seconds without a line from which a rank counts as silent."""
Line = Mapping[str, Any]
"""What a rank has said last: ``rank``, ``host``, ``pid``, ``began``, ``generation``, ``operations``, ``steps``;
``rate``, steps per second; ``at``, the line of the program; ``call``, the function of the package that it is in;
``still``, the seconds since it came there; ``waits``: ``what``, ``at``, ``seconds``, ``ranks``; without a launcher that
knows it, ``job``, alike in all ranks of one job. The reader adds ``age``, the seconds since then."""


class Statuses:
    """The newest line of each rank.

    Args:
        ranks: of the job; 0: this launcher does not start all of them, or more and fewer as the job goes on.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._began = time.time()
        self._rests: dict[int, bytes] = {}
        self._lines: dict[int, tuple[float, Line]] = {}

    def add(self, origin: int, data: bytes) -> None:
        """Add what a rank has said, which the launcher knows by the number ``origin``."""
        *lines, self._rests[origin] = (self._rests.get(origin, b"") + data).split(b"\n")
        now = time.monotonic()
        for text in lines:
            with suppress(ValueError):
                self._lines[origin] = now, {"rank": None, **_parsed(text)}

    def lines(self) -> list[Line]:
        """What each rank of the newest generation has said last, in their order; of one that has said nothing, its
        number."""
        now = time.monotonic()
        lines = _newest(
            {**line, "rank": origin if line["rank"] is None else line["rank"], "age": round(now - heard, 2)}
            for origin, (heard, line) in list(self._lines.items())
        )
        missing = set(range(self._ranks)) - {line["rank"] for line in lines}
        return sorted([*lines, *({"rank": rank} for rank in missing)], key=_number)

    def snapshot(self, command: str) -> dict[str, Any]:
        """What `collectives status` and the page show."""
        return _snapshot(self.lines(), os.getpid(), command, os.getcwd(), self._began)


def by_others() -> dict[int, dict[str, Any]]:
    """Return snapshots of this user's jobs on this host that another launcher has started, each by the least number of
    its processes here. Files that their ranks do not hold a lock on any more are removed: these were killed."""
    jobs: dict[str, list[Line]] = {}
    for path in user_folder().glob(f"{OF_RANKS}*"):
        try:
            with path.open("rb") as file:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
                    continue
                line = _parsed(file.readline(_MOST_LINE))
                age = time.time() - os.fstat(file.fileno()).st_mtime
            if line.keys() >= {"job", "pid", "began", "rank"}:
                jobs.setdefault(str(line["job"]), []).append({**line, "age": round(age, 2)})
        except (OSError, ValueError):
            continue  # it has just begun, or ends
    snapshots = {}
    for lines in jobs.values():
        pid, began = min((line["pid"], line["began"]) for line in lines)
        with suppress(OSError):
            command = shlex.join(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1])
            ordered = sorted(_newest(lines), key=_number)
            snapshots[pid] = _snapshot(ordered, pid, command, os.readlink(f"/proc/{pid}/cwd"), began)
    return snapshots


def _parsed(text: bytes) -> Line:
    """What a rank has said. ValueError: it is nothing that a rank says."""
    try:
        line = json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(line, dict):
        raise ValueError(f"expected an object, got {type(line).__name__}")
    for name in ("rank", "pid", "generation"):
        if not isinstance(line.get(name, 0), int | None):
            raise ValueError(f"{name}: expected a whole number")
    for name in ("began", "still"):
        if not isinstance(line.get(name, 0), int | float):
            raise ValueError(f"{name}: expected a number")
    return line


def _newest(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of the newest generation of an elastic job, or all."""
    lines = list(lines)
    newest = max((line.get("generation") or 0 for line in lines), default=0)
    return [line for line in lines if (line.get("generation") or 0) == newest]


def _number(line: Line) -> int:
    return int(line["rank"])


def _snapshot(lines: Sequence[Line], pid: int, command: str, folder: str, began: float) -> dict[str, Any]:
    here = folder + os.sep
    job = {"pid": pid, "host": socket.gethostname(), "command": command, "seconds": round(time.time() - began, 1)}
    return {
        "job": job,
        "ranks": [{**line, "does": does(line).replace(here, "")} for line in lines],
        "late": [sentence.replace(here, "") for sentence in late(lines)],
    }


def late(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each rank that others wait for: who waits for how long and in what, and what it does
    itself. Those that wait for nobody, and so hold up the others, come first."""
    by_rank = {line["rank"]: line for line in lines}
    waiters: dict[int, list[Line]] = {}
    for line in lines:
        for rank in _missing(line, lines):
            waiters.setdefault(rank, []).append(line)
    waiting = {line["rank"] for waits in waiters.values() for line in waits}
    sentences = []
    for rank, waits in waiters.items():
        longest = max(waits, key=_seconds)
        numbers = sorted(line["rank"] for line in waits)
        own = by_rank.get(rank)
        sentence = (
            f"rank {rank}{' on ' + own['host'] if own and 'host' in own else ''} is late: {listed(numbers)} "
            f"wait{'' if numbers[1:] else 's'} {_seconds(longest):.1f} s for it in {_what(longest)}; "
            f"{'it ' + does(own) if own else 'it is on another host: ask there'}"
        )
        sentences.append((rank in waiting, -len(waits), rank, sentence))
    return [sentence for *_, sentence in sorted(sentences)]


def does(line: Line) -> str:
    """Return what a rank does, in words."""
    if "at" not in line:
        return "has not called init() yet"
    silent = _silent(line)
    doing = f"{'was' if silent else 'is'} at {line['at'] or 'no line that Python knows'}"
    waits = bool(line["call"]) and (bool(line.get("waits")) or _in_init(line))
    if waits:
        ranks = (line.get("waits") or {}).get("ranks")
        doing = f"wait{'ed' if silent else 's'}{' for ' + listed(ranks) if ranks else ''} in {_what(line)}"
    if silent:
        return (
            f"has reported nothing for {line['age']:.1f} s: it is stopped, or in C code that holds Python's lock; "
            f"before that, it {doing}"
        )
    return f"{doing}, for {_seconds(line) if waits else line['still'] + line['age']:.1f} s"


def _missing(line: Line, lines: Sequence[Line]) -> Sequence[int]:
    """The ranks for which a rank waits: those that it names or, in init(), those that are not there."""
    if _silent(line) or "at" not in line or _seconds(line) < WAITS_FROM:
        return ()
    if _in_init(line):
        return [other["rank"] for other in lines if "operations" not in other and not _in_init(other)]
    return (line.get("waits") or {}).get("ranks") or ()


def _in_init(line: Line) -> bool:
    return line.get("call") == "init" and "operations" not in line


def _seconds(line: Line) -> float:
    """For how long a rank waits."""
    said = (line.get("waits") or {}).get("seconds")
    return float(line["still"] if said is None else said) + float(line["age"])


def _what(line: Line) -> str:
    """In what a rank waits, and at which line."""
    waits = line.get("waits") or {"what": f"{line['call']}()", "at": ""}
    return f"{waits['what']} ({waits['at'] or line['at']})"


def _silent(line: Line) -> bool:
    return bool(line.get("age", 0.0) > SILENT_FROM)


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``ranks 0, 1, 2``."""
    numbers = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"
