"""Telling the steps of a training apart by the operations that come again.

A step ends when an operation comes that it has had already. An operation is known by its name; without a name by what
it asks for, and then several of one step may be alike. So of all that comes again only the rarest count, and of these
only the large: not the loss that is averaged twice a step, nor what comes once in a hundred steps. What never comes
again, such as a broadcast of the parameters, says nothing.

    p q r | a b c | a b c | c a b | b d c     a broadcast first, then steps in any order, and with changing sets
    w x x y x | w x x y x                     unnamed, x of one shape: it comes three times as often as w and y, which tell the steps

Ranks that see the same operations draw the same conclusions: nothing here depends on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence

_LARGE = 16
"""Operations below this fraction (1/16) of the largest one that comes again tell no steps."""
_WINDOW = 1000
_WINDOW_OF_EACH = 8
"""Operations, in all and for each different one, after which all counts are halved: what is long ago counts less."""
_MOST_KNOWN = 1 << 16
"""Different operations after which they are halved anyway, which forgets all that have come once."""
_MOST_BATCHES = 1000
"""Batches after which a step ends where nothing comes again."""


class Steps:
    """Finds where steps begin in a sequence of batches.

    Attributes:
        repeats: whether anything has come again so far.
    """

    def __init__(self) -> None:
        self.repeats = False
        self._counts: dict[str | int, int] = {}
        self._nbytes: dict[str | int, int] = {}
        self._total = 0
        self._had: set[str | int] = set()
        """What this step has had."""
        self._batches = 0
        self._least, self._rarest = 0.0, 2
        """What tells steps has at least so many bytes, and has come at most twice as often."""

    def begins(self, operations: Sequence[tuple[str | int, int]]) -> bool:
        """Whether a step begins with this batch; all of it belongs to that step then.

        Args:
            operations: of the batch, by name (what has none: a number that is alike for all that ask for the same), and
                their bytes.
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
        """Of what this step has had: what belongs to an earlier part of the program tells nothing any more."""
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
