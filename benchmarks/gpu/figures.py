"""What a part of the GPU check hands over: figures with their bars, or the reason why it cannot run here."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import collectives
from collectives.base.errors import TransportError
from collectives.tools.bench.device import why_not
from collectives.tools.bench.ranks import Ranks

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


def torch_of(ranks: Ranks, device: str = "cuda") -> Any:
    """torch, with this rank's GPU as its current one; skips this part on all ranks where one of them lacks it."""
    problem = why_not(device)
    torch: Any = None
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        problem = problem or f"no torch: {error}"
    else:
        if device == "cuda" and not torch.cuda.is_available():
            problem = problem or "this torch has no CUDA"
    problem = ranks.agree(problem)
    if problem:
        skip(problem, ranks.rank)
    if device == "cuda":
        torch.cuda.set_device(collectives.local_rank() % torch.cuda.device_count())
    return torch


def attempt(call: Callable[[], object], rank: int = 0) -> None:
    """Make a call on all ranks; skip this part where the planner says that its transport cannot be had."""
    try:
        call()
    except TransportError as error:
        if not str(error).startswith("transport="):
            raise  # it was had, and failed
        skip(str(error), rank)


def _write(content: dict[str, Any]) -> None:
    if RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(content, indent=1))
