"""`jax.grad` and `jax.value_and_grad` with gradients that are combined over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from collectives.base.reduce_op import Op
from collectives.jax.operations import allreduce
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    ordered: bool = True,
    **keywords: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients are combined over the ranks, all in one fused call.

    Args:
        fun, argnums, has_aux, keywords: as for `jax.value_and_grad`.
        op, compression, prescale_factor, postscale_factor, process_set, name, ordered: as for
            `collectives.jax.allreduce`.

    Returns:
        A function that returns this rank's value (and auxiliary data), and the combined gradients.

    Example:
        >>> value, gradient = hvd.value_and_grad(lambda x: (hvd.rank() * x).sum())(jnp.ones(2))
        >>> gradient
        Array([0.5, 0.5], dtype=float32)
    """
    local = jax.value_and_grad(fun, argnums, has_aux, **keywords)

    @functools.wraps(fun)
    def call(*arguments: Any, **options: Any) -> Any:
        value, gradients = local(*arguments, **options)
        how = None, name, compression, op, prescale_factor, postscale_factor, process_set
        return value, allreduce(gradients, *how, ordered=ordered)

    return call


def grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **keywords: Any
) -> Callable[..., Any]:
    """`jax.grad` whose gradients are combined over the ranks; arguments as for `value_and_grad`.

    Example:
        >>> hvd.grad(lambda x: (hvd.rank() * x).sum())(jnp.ones(2))
        Array([0.5, 0.5], dtype=float32)
    """
    with_value = value_and_grad(fun, argnums, has_aux, **keywords)

    @functools.wraps(fun)
    def call(*arguments: Any, **options: Any) -> Any:
        value, gradients = with_value(*arguments, **options)
        return (gradients, value[1]) if has_aux else gradients

    return call
