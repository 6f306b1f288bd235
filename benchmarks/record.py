"""What one contestant did in one row: the unit that the tables, the JSON file and the plot are made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.measure import Summary, bandwidth

OURS = "collectives"
"""The contestant that everybody is compared with: the engine as a user calls it, its planner choosing."""


@dataclass(frozen=True)
class Record:
    """Times in microseconds, bandwidths in GB/s (1e9 bytes), sizes in bytes. ``time`` is None where a contestant
    cannot."""

    collective: str
    contestant: str
    mode: str
    size: int
    count: int
    dtype: str
    op: str
    root: int
    ranks: int
    factor: float
    wrong: int | None = None
    time: Summary | None = None
    ratio: Summary | None = None
    limit: float | None = None
    unavailable: str | None = None

    @property
    def algbw(self) -> float:
        return bandwidth(self.size, self.time.median) if self.time else 0.0

    @property
    def busbw(self) -> float:
        return self.algbw * self.factor

    @property
    def percent_of_limit(self) -> float | None:
        """100 * the memory floor's time / this contestant's."""
        if self.time is None or self.limit is None or self.time.median <= 0:
            return None
        return 100 * self.limit / self.time.median

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "algbw": self.algbw, "busbw": self.busbw, "percent_of_limit": self.percent_of_limit}
