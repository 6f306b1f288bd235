"""Finds the steps of a training by the operations that recur.

A step ends when an operation recurs that was in it already. An operation is identified by its name; without a name by
its request, and then several of one step may be alike. So only the rarest of the recurring operations count, and of
these only large ones: not the loss that is averaged twice a step, nor what recurs once in a hundred steps. Operations
that never recur, such as a broadcast of the parameters, are ignored.

    p q r | a b c | a b c | c a b | b d c     a broadcast first, then steps in any order, and with changing sets
    w x x y x | w x x y x                     unnamed, x of one shape: three times as frequent as w and y, which mark
                                              the steps

Ranks that see the same operations find the same steps: nothing here depends on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

_LARGE = 16
"""Operations smaller than 1/16 of the largest recurring one do not mark steps."""
_WINDOW = 1000
_WINDOW_OF_EACH = 8
"""Operations, in all and per distinct one, after which all counts are halved, so that old ones count less."""
_MOST_KNOWN = 1 << 16
"""Distinct operations after which counts are halved anyway, which forgets those that came once."""
_MOST_BATCHES = 1000
"""Batches after which a step ends if nothing recurs."""


class Steps:
    """Finds where steps begin in a sequence of batches.

    Attributes:
        repeats: whether any operation has recurred so far.
    """

    def __init__(self) -> None:
        self.repeats = False
        self._counts: dict[str | int, int] = {}
        self._nbytes: dict[str | int, int] = {}
        self._total = 0
        self._had: set[str | int] = set()
        """The operations of this step."""
        self._batches = 0
        self._least, self._rarest = 0.0, 2
        """Operations that mark steps have at least so many bytes, and at most twice this count."""

    def begins(self, operations: Sequence[tuple[str | int, int]]) -> bool:
        """Whether a step begins with this batch, all of which then belongs to that step.

        Args:
            operations: the batch's, each with its bytes: by name, or by a number that equals that of equal requests.
        """
        new = False
        self._batches += 1
        for known_by, nbytes in operations:
            self._count(known_by, nbytes)
            often = self._counts.get(known_by, 0)
            new = new or (known_by in self._had and nbytes >= self._least and often <= 2 * self._rarest)
            self._had.add(known_by)
        if not new and self._batches <= _MOST_BATCHES:
            return False
        self._weigh()
        self._had = {known_by for known_by, _ in operations}
        self._batches = 1
        return True

    def _weigh(self) -> None:
        """Update the thresholds from this step's operations; those of earlier parts of the program no longer count."""
        again = [known_by for known_by in self._had if self._counts.get(known_by, 0) > 1]
        self._least = max((self._nbytes[known_by] for known_by in again), default=0) / _LARGE
        self._rarest = min(
            (self._counts[known_by] for known_by in again if self._nbytes[known_by] >= self._least), default=2
        )

    def _count(self, known_by: str | int, nbytes: int) -> None:
        counts = self._counts
        counts[known_by] = counts.get(known_by, 0) + 1
        self._nbytes[known_by] = nbytes
        self._total += 1
        self.repeats = self.repeats or counts[known_by] > 1
        if self._total > max(_WINDOW, _WINDOW_OF_EACH * len(counts)) or len(counts) > _MOST_KNOWN:
            self._counts = {key: count // 2 for key, count in counts.items() if count > 1}
            self._nbytes = {key: self._nbytes[key] for key in self._counts}
            self._total = sum(self._counts.values())
            self._weigh()
