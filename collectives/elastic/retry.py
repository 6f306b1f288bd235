"""Collectives in which no work is lost: ranks that survive a death carry out the same ones again, in the smaller world.

What a step of the training does together is one call of `Steps.carry_out`, whose last part is a collective of all
ranks: a vote. Who leaves the vote knows that every rank has done all before it. So of the survivors of a death, who
tell each other how many steps they have left,

    some have left this one    the others have its results too, and go on
    none has                   all carry it out again, with the same values, which the caller has kept

No rank has applied anything of a step that is carried out again. If a survivor is elsewhere in its program, or the
ranks are too few without newcomers, the error is raised, and `run` returns to the last commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from collectives.base.errors import RecoverableError
from collectives.base.reduce_op import Op
from collectives.worlds import generations, runtime


class Steps:
    """The steps of one training function.

    Attributes:
        renewed: an error was raised after the generation had ended: it need not end again.
    """

    def __init__(self) -> None:
        self._left = 0
        self.renewed = False
        self._word = np.zeros(1, np.int64)

    def carry_out(self, step: Callable[[], object], restore: Callable[[], object] = lambda: None) -> bool:
        """Call ``step``, whose last collective all ranks take part in; again, where ranks die.

        Args:
            restore: makes this rank's values what they were before the step; called before it is repeated.

        Returns:
            Whether this rank has left its last collective, too: not if it failed here, and other ranks had left it.

        Raises:
            RecoverableError: ranks have died, and the others cannot carry out the step again.
        """
        while True:
            try:
                step()
                self._left += 1
                return True
            except RecoverableError as error:
                left = generations.renew(error, self._left)
                if None in left:
                    self.renewed = True
                    raise
                if max(left) > self._left:
                    self._left += 1
                    return False
                restore()

    def vote(self) -> None:
        """A collective of all ranks."""
        runtime.world().allreduce_(self._word, op=Op.MAX, name="elastic: vote")


_current: Steps | None = None


def steps() -> Steps | None:
    """Those of the training function that runs; None where it returns to the last commit instead."""
    return _current


@contextmanager
def retrying(again: bool) -> Iterator[Steps]:
    """Have the steps of the body carried out again where ranks die, or not."""
    global _current
    steps = Steps()
    _current = steps if again else None
    try:
        yield steps
    finally:
        _current = None
