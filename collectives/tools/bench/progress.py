"""A progress bar on rank 0's terminal; none where standard error is not a terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from collectives.tools.bench.ranks import Ranks

_LAUNCHERS = ("mpirun", "mpiexec", "prte", "prun", "orte", "hydra", "collectives")
_PAUSE = 0.2
"""Seconds between two pictures: drawing takes time from the rank that draws."""


class Progress:
    """Counts steps, and shows them where rich is installed. Draws between measurements only: no thread."""

    def __init__(self, total: int, ranks: Ranks) -> None:
        self._bar: Any = None
        self._done = 0
        self._drawn = 0.0
        if ranks.rank == 0 and watched():
            try:
                from rich import progress
                from rich.console import Console
            except ImportError:
                return
            # A rank's standard error is a pipe to the launcher, from which no width can be read: the console is told
            # one.
            width = None if sys.stderr.isatty() else 80
            columns = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TimeRemainingColumn())
            self._bar = progress.Progress(
                *columns,
                console=Console(stderr=True, force_terminal=True, width=width),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.add_task("", total=total)

    def tick(self) -> None:
        """One step more."""
        self._done += 1
        if self._bar is None or perf_counter() - self._drawn < _PAUSE:
            return
        self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=self._done)
        self._bar.refresh()
        self._drawn = perf_counter()

    def clear(self) -> None:
        """Take the bar off the screen before a line is printed; a later step draws it again."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *failure: object) -> None:
        self.clear()


def watched() -> bool:
    """Whether standard error ends on a terminal: its own, or that of the launcher which forwards it."""
    if sys.stderr.isatty():
        return True
    process = os.getppid()
    try:
        for _ in range(4):
            folder = Path(f"/proc/{process}")
            status = (folder / "stat").read_text()
            name = status[status.index("(") + 1 : status.rindex(")")]
            if not name.startswith(_LAUNCHERS):
                return False
            if os.readlink(folder / "fd/2").startswith(("/dev/pts/", "/dev/tty")):
                return True
            process = int(status[status.rindex(")") + 2 :].split()[1])
    except (OSError, ValueError):
        return False
    return False
