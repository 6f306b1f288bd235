"""The tally: eight integers that the ranks sum in every step, to detect differences between them.

- A rank has gradients that were not submitted in its backward pass.
- A rank has combined its gradients more often than another one, as by reading them between two backward passes, so that
  gradients of different steps would be combined.
- A rank without a backward pass combines gradients in its ``step()`` while others have read theirs, so that it would
  not make their changes, such as clipping.
- The ranks' gradients have different layouts, so that unrelated elements would be added.
"""

from __future__ import annotations

import numpy as np

from collectives.base.errors import MismatchError
from collectives.base.reduce_op import Op
from collectives.worlds.world import World

_LAYOUT = (1 << 24) - 1
"""Bits of a fingerprint that are kept, so that sums of squares do not overflow."""


class Tally:
    """The tally of one reducer.

    Attributes:
        combined: how often this rank has combined its gradients since they were last applied or reset.
    """

    def __init__(self) -> None:
        self.combined = 0
        self._sums = np.zeros(8, np.int64)

    def sum(
        self,
        world: World,
        name: str,
        not_submitted: int,
        reads: bool,
        idle: bool,
        layout: int,
    ) -> None:
        """Sum over the ranks; a joined rank adds zeros.

        Args:
            not_submitted: the number of this rank's gradients that have not been submitted.
            reads: this rank's program reads gradients.
            idle: this rank applies gradients without having run a backward pass.
            layout: a fingerprint of what this rank combines.
        """
        combined = self.combined
        layout &= _LAYOUT
        counts = not_submitted, 1, combined, combined * combined
        self._sums[:] = *counts, reads, idle, layout, layout * layout
        world.allreduce_(self._sums, op=Op.SUM, name=name)

    @property
    def all_submitted(self) -> bool:
        """Whether all ranks have submitted all gradients."""
        return not self._sums[0]

    @property
    def same_layouts(self) -> bool:
        """Whether all ranks' fingerprints are alike."""
        sums = self._sums.tolist()
        return bool(sums[1] * sums[7] == sums[6] * sums[6])  # the variance is 0

    def check(self, rank: int) -> None:
        """Raise on all ranks if the sums show ranks in different steps.

        Raises:
            MismatchError: the ranks differ; see the module.
        """
        _, ranks, combined, squares, reading, idle, *_ = self._sums.tolist()
        if ranks * squares != combined * combined:  # the variance is not 0
            raise MismatchError(
                f"rank {rank}: gradients were combined with those of another step on another rank, which has combined "
                f"them more or less often since its last step (here: {self.combined} times before); call "
                f"optimizer.step() and synchronize(), and read gradients between two backward passes, equally often on "
                f"every rank"
            )
        if reading and idle:
            raise MismatchError(
                f"rank {rank}: {reading} of {ranks} ranks read gradients before optimizer.step(), where {idle} had no "
                f"backward pass, and came in optimizer.step() only: what the others do to gradients, such as clipping, "
                f"would not be done there; call optimizer.synchronize() on every rank before gradients are read, or "
                f"optimizer.step() on none that has no data"
            )
