"""Which of two ways to do the same takes less time here: that is measured, call by call."""

from __future__ import annotations

_PERIOD = 256
"""Calls after which both ways are tried again: what else the machine does, and where its cores are, changes."""
_TRIALS = 6
"""Calls in which they are tried, in turn."""


class FasterWay:
    """The ways are False and True. The medians of the latest trials count: one way may suffer more than the other from
    what else the machine does, and that is to show."""

    def __init__(self) -> None:
        self._calls = 0
        self._times: tuple[list[float], list[float]] = [], []
        self._faster = False

    def choose(self) -> bool:
        """The way of the next call."""
        at = self._calls % _PERIOD
        return at % 2 == 1 if at < _TRIALS else self._faster

    def note(self, way: bool, seconds: float) -> None:
        """Note which way the call took after all, and how long."""
        at = self._calls % _PERIOD
        self._calls += 1
        if at < _TRIALS:
            self._times[way].append(seconds)
        if at == _TRIALS - 1:
            medians = [sorted(times)[len(times) // 2] for times in self._times if times]
            self._faster = len(medians) == 2 and medians[True] < medians[False]
            self._times = [], []
