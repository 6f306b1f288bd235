"""Collectives on arrays that are there: NumPy views of JAX's memory, and results that JAX takes over without a copy.

A JAX array never changes, so the engine only reads it. A result is written into memory that is aligned to 64 bytes,
comes from the world's pool and goes back to it when JAX has dropped it; nobody writes to it in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from collectives.base.logging import logger
from collectives.jax import compat
from collectives.jax.collective_call import CollectiveCall

_ALIGNED_FROM = 4096
"""Bytes below which a copy of a result costs nothing."""


def run(call: CollectiveCall, operands: Sequence[Any]) -> list[Any]:
    """Carry a call out on JAX arrays, on the CPU or a GPU; new JAX arrays, placed like them."""
    settle()
    given = [_readable(operand) for operand in operands]
    results = None
    if call.collective == "allreduce" and all(type(each) is np.ndarray for each in given):
        world = call.world()
        results = [
            world.memory(each.size, each.dtype).reshape(each.shape)
            if each.nbytes >= _ALIGNED_FROM
            else np.empty(each.shape, each.dtype)
            for each in given
        ]
    made = call.run(given, results)
    return placed(made if results is None else results, operands)


def exchange(call: CollectiveCall, operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """`run` of an alltoall; and how many rows came from each rank."""
    settle()
    made, received = call.exchange([_readable(operand) for operand in operands])
    return placed(made, operands), received[0]


def settle() -> None:
    """Return when compiled programs have made their ordered calls: they come first, since they were called before.

    Whoever reads the results of one that has failed gets its error there; it is nothing that later calls must suffer
    from.
    """
    try:
        jax.effects_barrier()
    except Exception as error:
        logger.warning("an earlier program has failed: %s", error)
        compat.forget_effects()


def _readable(operand: Any) -> Any:
    """As the engine reads it: what lies on a GPU it takes as it is."""
    if not isinstance(operand, jax.Array):
        return np.asarray(operand)
    if next(iter(operand.devices())).platform == "cpu":
        return np.asarray(operand)
    return operand if len(operand.devices()) == 1 else operand.addressable_data(0)


def placed(made: list[Any], operands: Sequence[Any]) -> list[Any]:
    """Results as JAX arrays: where the operands are, if the program has put them there."""
    if any(isinstance(each, jax.Array) for each in made):
        return [each if isinstance(each, jax.Array) else compat.adopt([each])[0] for each in made]
    if any(isinstance(each, jax.Array) and compat.committed(each) for each in operands):
        places = [
            each.sharding if isinstance(each, jax.Array) and compat.committed(each) else None for each in operands
        ]
        return compat.adopt(made, places)
    return compat.adopt(made)
