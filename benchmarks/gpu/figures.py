"""What a part of the GPU check hands to the command that runs it: figures with their bars, or the reason why it cannot
run here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from collectives.base.errors import TransportError

RESULT = "COLLECTIVES_CHECK_RESULT"
"""The environment variable that names the file for a part's result."""


@dataclass(frozen=True)
class Figure:
    """One measured number, and what is asked of it: ``least`` or ``most``; neither: it is there for the record.

    Attributes:
        record: why the bar cannot be reached on this machine, where it cannot: the number is then kept, and not judged.
    """

    what: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    record: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the bar is reached; None without a bar, or where it cannot be reached."""
        if self.record or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def bar(self) -> str:
        """The bar, for people."""
        parts = [
            f">= {self.least:g}" if self.least is not None else "",
            f"<= {self.most:g}" if self.most is not None else "",
        ]
        return " ".join(filter(None, parts))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bar": self.bar, "met": self.met}


def publish(figures: Sequence[Figure], **details: Any) -> None:
    """Print a part's figures and hand them over, with whatever else belongs into the JSON file."""
    for figure in figures:
        print(f"{figure.what:<72}{figure.value:>12.2f} {figure.unit:<12}{figure.bar}", flush=True)
    _write({"figures": [figure.as_dict() for figure in figures], **details})


def skip(reason: str, rank: int = 0) -> NoReturn:
    """End this part: it cannot run here. On every rank, for the same reason."""
    if rank == 0:
        print(f"skipped: {reason}", flush=True)
        _write({"skipped": reason})
    sys.exit(0)


def attempt(call: Callable[[], object], rank: int = 0) -> None:
    """Make a call on all ranks that shows whether its transport can be had here; skip this part where the planner says
    that it cannot."""
    try:
        call()
    except TransportError as error:
        if not str(error).startswith("transport="):
            raise  # it was had, and failed
        skip(str(error), rank)


def _write(content: dict[str, Any]) -> None:
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(content, indent=1))
