"""``collectives status [JOB]``: what the ranks of a running job do, and who waits for whom."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from collectives.launch import status_server
from collectives.launch.status import by_others
from collectives.launch.usage import Parser

_COLUMNS = ("rank", "host", "generation", "operations", "steps", "steps/s", "what it does")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the status of a job that was started on this host, and return the exit code."""
    parser = Parser(
        prog="collectives status",
        description="Show what each rank of a running job does, which rank it waits for, and at which line.",
        epilog="On other hosts: ssh HOST collectives status. As a web page: collectivesrun --status-port.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "job",
        metavar="JOB",
        nargs="?",
        type=int,
        help="the process id of the job's collectivesrun or, without one, of a rank",
    )
    parser.add_argument("--json", action="store_true", help="print the data instead of a table")
    options = parser.parse_args(arguments)
    try:
        running = status_server.jobs() if options.job is None else _of(options.job)
    except OSError as error:
        named = "" if options.job is None else f" {options.job}"
        print(
            f"collectives status: no job{named} of this user on this host answered ({error}) [U12]",
            file=sys.stderr,
        )
        return 1
    if len(running) != 1:
        found = "\n".join(f"  {pid}  {snapshot['job']['command']}" for pid, snapshot in sorted(running.items()))
        problem = f"several jobs are running; name one of them:\n{found}" if running else "no job is running here [U30]"
        print(f"collectives status: {problem}", file=sys.stderr)
        return 1
    (shown,) = running.values()
    print(json.dumps(shown, indent=2) if options.json else in_words(shown))
    return 0


def _of(pid: int) -> Mapping[int, Mapping[str, Any]]:
    """Return the snapshot of the job of a launcher, or of a rank that another launcher has started."""
    of_rank = {number: job for number, job in by_others().items() if any(rank["pid"] == pid for rank in job["ranks"])}
    return of_rank or {pid: status_server.ask(pid)}


def in_words(shown: Mapping[str, Any]) -> str:
    """Return a snapshot of `collectives.launch.status.Statuses` as text."""
    job = shown["job"]
    rows = [_COLUMNS, *(_row(rank) for rank in shown["ranks"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    table = [
        "  ".join([*(text.rjust(width) for text, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    late = ["", *shown["late"]] if shown["late"] else []
    return "\n".join(
        [f"{job['command']} (process {job['pid']} on {job['host']}, {job['seconds']:.0f} s)", *table, *late]
    )


def _row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    texts = [rank.get(key) for key in ("rank", "host", "generation", "operations", "steps")]
    rate = f"{rank['rate']:.1f}" if rank.get("steps") else ""
    return (*("" if text is None else str(text) for text in texts), rate, rank["does"])


if __name__ == "__main__":
    sys.exit(main())
