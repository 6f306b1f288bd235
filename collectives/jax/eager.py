"""Eager execution: NumPy views of JAX's memory as inputs, and results that JAX adopts without a copy.

JAX arrays are immutable, so the engine only reads them. A result is written into 64-byte-aligned memory of the world's
result pool, which takes it back when JAX has dropped the array; nothing writes to it in between.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from collectives.base.logging import logger
from collectives.elastic import retry
from collectives.jax import compat
from collectives.jax.collective_call import CollectiveCall
from collectives.worlds import runtime
from collectives.worlds.process_sets import ProcessSet

_ALIGNED_FROM = 4096
"""Bytes from which on a result gets pool memory; below it a copy costs nothing."""


def run(call: CollectiveCall, operands: Sequence[Any]) -> list[Any]:
    """Carry a call out on JAX arrays, on the CPU or a GPU, after `wait_for_effects`.

    Returns:
        New JAX arrays, placed like the operands.
    """
    arrays = [_readable(operand) for operand in operands]
    results = None
    if call.collective == "allreduce" and all(type(each) is np.ndarray for each in arrays):
        world = call.world()
        results = [
            world.memory(each.size, each.dtype).reshape(each.shape)
            if each.nbytes >= _ALIGNED_FROM
            else np.empty(each.shape, each.dtype)
            for each in arrays
        ]
    made = call.run(arrays, results)
    return placed(made if results is None else results, operands)


def exchange(call: CollectiveCall, operands: Sequence[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """`run` of an alltoall; also returns how many rows came from each rank."""
    made, received = call.exchange([_readable(operand) for operand in operands])
    return placed(made, operands), received[0]


def wait_for_effects() -> None:
    """Wait until compiled programs have made their ordered calls, which precede this one in program order.

    The error of a failed program is raised where its results are read, so later calls only log it.

    Raises:
        RecoverableError: one has lost ranks, and the training function begins anew; see `collectives.elastic.retry`.
    """
    try:
        jax.effects_barrier()
    except Exception as error:
        logger.warning("an earlier program has failed: %s", error)
        compat.forget_effects()
    retry.check("a call on JAX's arrays")


def placed(made: list[Any], operands: Sequence[Any]) -> list[Any]:
    """Return results as JAX arrays, on the devices of operands that the program has committed to a device."""
    if any(isinstance(each, jax.Array) for each in made):
        return [each if isinstance(each, jax.Array) else compat.adopt([each])[0] for each in made]
    committed = [isinstance(each, jax.Array) and compat.committed(each) for each in operands]
    if not any(committed):
        return compat.adopt(made)
    return compat.adopt(made, [each.sharding if own else None for each, own in zip(operands, committed, strict=True)])


def _readable(operand: Any) -> Any:
    """An operand as the engine reads it: a NumPy view on the CPU, the array itself on a GPU."""
    if not isinstance(operand, jax.Array):
        return np.asarray(operand)
    if next(iter(operand.devices())).platform == "cpu":
        return np.asarray(operand)
    return operand if len(operand.devices()) == 1 else operand.addressable_data(0)


# ---- start and end, which wait for compiled programs that are still running


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None,
    *,
    rendezvous: str | None = None,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
) -> None:
    """Join the other ranks: see `collectives.init`.

    Example:
        >>> hvd.init()
    """
    runtime.init(comm, process_sets, rendezvous=rendezvous, store=store, rank=rank, size=size)
    # Exit handlers run in reverse order: registered after the world's own, this one carries out what the program has
    # dispatched before the world ends.
    atexit.unregister(_finish_programs)
    atexit.register(_finish_programs)


def shutdown() -> None:
    """Leave the other ranks once compiled programs have made their ordered calls: see `collectives.shutdown`."""
    _finish_programs()
    runtime.shutdown()


def _finish_programs() -> None:
    if runtime.is_initialized():
        wait_for_effects()
