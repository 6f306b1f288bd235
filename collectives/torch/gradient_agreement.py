"""What the ranks compare of their gradients, where these are missing, sparse or different on some of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.base.reduce_op import Op
from collectives.torch.buckets import GradientBucket
from collectives.torch.gradient_slot import DENSE, GradientSlot
from collectives.worlds.world import World


def disagree(world: World, prefix: str, buckets: Sequence[GradientBucket]) -> NoReturn:
    """Name the first gradient in which the ranks' buckets differ.

    Args:
        prefix: of the operations' names.

    Raises:
        MismatchError: always.
    """
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
            f"{there}; change, add and unfreeze parameters between the same steps on every rank"
        )


def agree_on_kinds(world: World, prefix: str, slots: Sequence[GradientSlot]) -> None:
    """Set `GradientSlot.kind` of each gradient to the largest of the ranks' kinds."""
    kinds = np.array([_kind(slot) for slot in slots], np.uint8)
    world.allreduce_(kinds, op=Op.MAX, name=f"{prefix}gradients used")
    for slot, kind in zip(slots, kinds.tolist(), strict=True):
        slot.kind = kind


def _kind(slot: GradientSlot) -> int:
    """This rank's kind of a gradient."""
    if slot.empty:
        return 0
    grad = slot.param.grad
    return int(grad.sparse_dim()) if grad.is_sparse else slot.sparse_dim or slot.was_sparse or DENSE


def refuse_swapped(slots: Sequence[GradientSlot]) -> None:
    """Refuse gradients that the program might have read before they were combined, since no hook was called.

    Raises:
        InvalidArgumentError: torch has swapped a parameter's tensor for another one.
    """
    for slot in slots:
        if slot.param._cdata != slot.hooked:
            raise InvalidArgumentError(
                f"gradient of {slot.name!r}: expected the parameter to keep its tensor, to which the hook belongs, "
                f"but torch has swapped it (torch.__future__.set_swap_module_params_on_conversion); make the "
                f"DistributedOptimizer after the model is converted or loaded"
            )
