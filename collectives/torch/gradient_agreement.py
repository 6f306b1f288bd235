"""What the ranks compare of their gradients.

In every step they sum the *tally*, eight integers, which shows on all ranks that

- a rank has gradients that were not submitted in its backward pass;
- a rank has combined its gradients more often than another one, as by reading them between two backward passes, so that
  gradients of different steps would be combined;
- a rank without a backward pass combines gradients in its ``step()`` while others have read theirs, so that it would
  not make their changes, such as clipping;
- the ranks' gradients have different layouts, so that unrelated elements would be added.

Only then do they exchange more.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.torch.buckets import GradientBucket
from collectives.torch.gradient_slot import DENSE, GradientSlot
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

    def sum(self, world: World, name: str, not_submitted: int, reads: bool, idle: bool, layout: int) -> None:
        """Sum over the ranks; a joined rank adds zeros.

        Args:
            not_submitted: the number of this rank's gradients.
            reads: its program reads gradients.
            idle: it applies gradients without having run a backward pass.
            layout: a fingerprint of what it combines.
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
        """Raise a `MismatchError` on all ranks if the sums show ranks in different steps."""
        _, ranks, combined, squares, reading, idle, *_ = self._sums.tolist()
        if ranks * squares != combined * combined:  # the variance is not 0
            raise MismatchError(
                f"rank {rank}: gradients of different steps were combined, because since its last step another rank "
                f"combined gradients more or less often than this rank ({self.combined} times); call optimizer.step() "
                "and synchronize(), and read gradients between two backward passes, equally often on every rank [M15]"
            )
        if reading and idle:
            raise MismatchError(
                f"rank {rank}: {reading} of {ranks} ranks read gradients before optimizer.step(), but {idle} had no "
                "backward pass and called only optimizer.step(), so they would miss what the others do to gradients, "
                "such as clipping; call optimizer.synchronize() on every rank before gradients are read, or do not "
                "call optimizer.step() on a rank without data [M16]"
            )


def agree_on_order(world: World, prefix: str, names: Sequence[str]) -> dict[str, int] | None:
    """The places of gradients that all ranks give them: those on the first rank, where the ranks' orders differ.

    Returns:
        None if all ranks have this order, or other gradients than this rank.
    """
    order = zlib.crc32(repr(names).encode()) & _LAYOUT
    sums = np.array([1, order, order * order], np.int64)
    world.allreduce_(sums, op=Op.SUM, name=f"{prefix}order of gradients")
    ranks, total, squares = sums.tolist()
    if ranks * squares == total * total:  # the variance is 0
        return None
    places = {name: at for at, name in enumerate(world.broadcast_object(list(names), name=f"{prefix}names in order"))}
    return places if places.keys() == set(names) else None


def disagree(world: World, prefix: str, buckets: Sequence[GradientBucket]) -> NoReturn:
    """Raise a `MismatchError` that names the first gradient in which the ranks' buckets differ."""
    lines = [line for bucket in buckets for line in bucket.describe()]
    in_flight = {bucket.name for bucket in buckets if bucket.handle is not None}
    layouts = world.allgather_object((lines, in_flight), name=f"{prefix}layouts")
    number, here, there = next(
        (number, here, there)
        for number, (others, _) in zip(world.ranks, layouts, strict=True)
        for here, there in itertools.zip_longest(lines, others, fillvalue="no further gradients")
        if here != there
    )
    rank = world.ranks[world.rank]
    submitted: set[str] = set().union(*(names for _, names in layouts))
    with world.composed(prefix + name for name in sorted(submitted - in_flight)):  # ranks need not wait for these
        raise MismatchError(
            f"rank {rank}: expected the same gradients on every rank: rank {rank} has {here}; rank {number} has "
            f"{there}; change, add and unfreeze parameters at the same step on every rank [M17]"
        )


def agree_on_kinds(world: World, prefix: str, slots: Sequence[GradientSlot]) -> None:
    """Set `GradientSlot.kind` of each gradient to the largest of the ranks' kinds."""
    kinds = np.array([_kind(slot) for slot in slots], np.uint8)
    world.allreduce_(kinds, op=Op.MAX, name=f"{prefix}gradients used")
    for slot, kind in zip(slots, kinds.tolist(), strict=True):
        slot.kind = kind


def _kind(slot: GradientSlot) -> int:
    if slot.empty:
        return 0
    grad = slot.param.grad
    return int(grad.sparse_dim()) if grad.is_sparse else slot.sparse_dim or slot.was_sparse or DENSE


def refuse_swapped(slots: Sequence[GradientSlot]) -> None:
    """Refuse gradients that the program might have read before they were combined, since no hook was called."""
    for slot in slots:
        if slot.param._cdata != slot.hooked:
            raise InvalidArgumentError(
                f"gradient of {slot.name!r}: torch has replaced the parameter's tensor, on which DistributedOptimizer "
                "had a hook (torch.__future__.set_swap_module_params_on_conversion); make the DistributedOptimizer "
                "after the model is converted or loaded [F28]"
            )
