"""Optax optimizers that use the gradients of all ranks.

    distributed_gradients(...)             a gradient transformation for `optax.chain`
    DistributedOptimizer(optimizer, ...)   the same in front of an optimizer, optionally summing several passes

All gradients of a step are combined in one fused call. Optax itself is optional: a transformation is a pair of
functions.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.options import refuse_unknown, spelled_out
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.jax.dispatch import ProgramOptions
from collectives.jax.operations import allreduce
from collectives.tensors.compression import Compression
from collectives.worlds.local_world import number_of_rank
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

if TYPE_CHECKING:
    from typing_extensions import Unpack

Optimizer = TypeVar("Optimizer")

_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
"""Numbers of optimizers, for each rank that is a thread, or for the process."""


class GradientTransformation(NamedTuple):
    """A pair of functions with Optax's names, used where Optax is not imported."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """The state of a transformation without state."""


class AggregationState(NamedTuple):
    """The state of an optimizer that sums the gradients of several passes.

    Attributes:
        inner: the wrapped optimizer's state.
        sums: a tuple of sums of this rank's gradients since the last step; several where `GradientOptions.carries` says
            so.
        passes: their number, an int32 scalar.
    """

    inner: Any
    sums: Any
    passes: Any


@spelled_out(ProgramOptions, ordered=True)
def distributed_gradients(
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    **options: Unpack[ProgramOptions],
) -> GradientTransformation:
    """Return a gradient transformation that combines the ranks' gradients, all in one fused call.

    ``optax.chain(hvd.distributed_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))`` clips the combined
    gradients.

    Args:
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        compression: `Compression.fp16` or ``bf16``, or a custom compressor.
        gradient_predivide_factor: f divides by f before the sum and by size/f afterwards; for Average only.
        process_set: the ranks that take part.
        name: of the operation; by default one for each transformation, numbered in the order in which they are made,
            which must be the same on every rank.
        ordered: False: the call is matched by that name alone, and a compiled step starts by JAX's fast path. Then use
            a transformation for each model, and read a result of the last step before `shutdown`, `join` and the end of
            the program, because JAX cannot wait for unordered calls; see `collectives.jax.operations`.
        algorithm, transport: as for `collectives.jax.allreduce`.

    Returns:
        A transformation without state, of Optax's own type if Optax has been imported.

    Raises:
        InvalidArgumentError: a factor without Average.

    Example:
        optimizer = optax.chain(hvd.distributed_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    """
    refuse_unknown(options, ProgramOptions)
    factors: Any = GradientOptions(
        op=op, compression=compression, gradient_predivide_factor=gradient_predivide_factor
    ).factors
    number = next(_numbers[number_of_rank()])
    label = name if name is not None or options.get("ordered", True) else f"distributed_gradients.{number}"

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        combined = allreduce(
            updates, name=label, compression=compression, op=op, process_set=process_set, **factors, **options
        )
        return combined, state

    return _transformation(lambda params: EmptyState(), update)


@spelled_out(ProgramOptions, ordered=True)
def DistributedOptimizer(
    optimizer: Optimizer,
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    **options: Unpack[ProgramOptions],
) -> Optimizer:
    """Wrap an Optax optimizer so that it uses the gradients of all ranks.

    With Adasum each rank's optimizer acts on its own gradients, and the resulting updates are combined.

    Further arguments of an update that Optax's optimizers take are combined as well, because ranks that follow losses
    of their own would diverge: ``value`` (of ``optax.contrib.reduce_on_plateau`` and others), ``grad`` and ``value_fn``
    (of line searches, as in ``optax.lbfgs``).

    Args:
        optimizer: with ``init(params)`` and ``update(gradients, state, params)``.
        op, compression, gradient_predivide_factor, process_set, name, ordered, algorithm, transport: as for
            `distributed_gradients`.
        backward_passes_per_step: the gradients of this many updates are summed on the rank before they are combined and
            the optimizer acts; the updates in between are zeros.
        average_aggregated_gradients: divide that sum by their number.

    Returns:
        A transformation with the same functions, of Optax's own type if Optax has been imported. Its state contains the
        optimizer's.

    Raises:
        InvalidTypeError: ``optimizer`` has no ``init`` and ``update``.
        InvalidArgumentError: fewer than one pass; a factor without Average; in an update, further arguments that cannot
            be combined with this ``op`` or several passes.

    Example:
        >>> import optax
        >>> optimizer = hvd.DistributedOptimizer(optax.sgd(1.0))
        >>> parameters = jnp.zeros(2)
        >>> updates, state = optimizer.update(jnp.array([hvd.rank(), 4.0]), optimizer.init(parameters), parameters)
        >>> updates
        Array([-0.5, -4. ], dtype=float32)
    """
    wrapped: Any = optimizer
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise InvalidTypeError(f"optimizer: expected an Optax optimizer, with init and update, got {optimizer!r} [F1]")
    algorithm: Any = options.get("algorithm")
    carries = GradientOptions(backward_passes_per_step=backward_passes_per_step, algorithm=algorithm).carries
    combined = distributed_gradients(op, compression, gradient_predivide_factor, process_set, name, **options)
    ordered = options.get("ordered", True)
    number = next(_numbers[number_of_rank()])

    def mean(values: Any) -> Any:
        label = f"distributed_values.{number}" if name is None else f"{name}.values"
        return allreduce(values, name=label, op=Op.AVERAGE, process_set=process_set, ordered=ordered)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if op is Op.ADASUM:
            updates, state = wrapped.update(gradients, state, params, **extra)
            return combined.update(updates, None)[0], state
        gradients = combined.update(gradients, None)[0]
        if not extra.keys().isdisjoint(_LOSSES):
            _check_losses(extra, op, backward_passes_per_step)
            extra = {**extra, **_averaged(extra, gradients, mean)}
        return wrapped.update(gradients, state, params, **extra)

    if backward_passes_per_step == 1:
        return _transformation(
            wrapped.init, lambda gradients, state, params=None, **extra: step(gradients, state, params, extra)
        )
    return _aggregating(wrapped.init, step, carries, average_aggregated_gradients)


_LOSSES = ("value", "grad", "value_fn")
"""Optax's names of a loss, its gradient and the function of both among the further arguments of an update."""


def _check_losses(extra: dict[str, Any], op: Op, passes: int) -> None:
    """Raise an `InvalidArgumentError` if losses cannot be combined over the ranks."""
    named = [name for name in _LOSSES if name in extra]
    if op is not Op.AVERAGE:
        raise InvalidArgumentError(
            f"{', '.join(named)}: expected op=Average, got op={op!r}; pass op=Average, or put "
            "distributed_gradients(op=...) into optax.chain before the optimizer and give update() values that are "
            "equal on all ranks [F40]"
        )
    if passes > 1 and named != ["value"]:
        raise InvalidArgumentError(
            f"{', '.join(named)}: expected backward_passes_per_step=1, got {passes}: a line search uses a single "
            "batch; leave backward_passes_per_step out [F41]"
        )


def _averaged(extra: dict[str, Any], gradients: Any, mean: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the means of losses over the ranks; ``gradients`` are combined already."""
    averages: dict[str, Any] = {}
    if "value" in extra:
        averages["value"] = mean(extra["value"])
    if "grad" in extra:
        averages["grad"] = gradients
    if "value_fn" in extra:
        value_fn = extra["value_fn"]
        # All ranks have the same parameters, so the inner mean changes nothing but the gradient, which it averages too.
        averages["value_fn"] = lambda params, *args, **keywords: mean(value_fn(mean(params), *args, **keywords))
    return averages


def _aggregating(init: Callable[[Any], Any], step: Callable[..., Any], carries: tuple[int, ...], average: bool) -> Any:
    """Return an optimizer that acts on the sum of several passes, which is made as `GradientOptions.carries` says."""
    passes, tree_map = len(carries), jax.tree_util.tree_map

    def begin(params: Any) -> AggregationState:
        zeros = tree_map(jnp.zeros_like, (params,) * carries[-1])
        return AggregationState(init(params), zeros, jnp.zeros((), jnp.int32))

    def update(
        gradients: Any, state: AggregationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AggregationState]:
        def added(carry: int) -> tuple[Any, ...]:
            sums = list(state.sums)
            carried = tree_map(lambda total, each: jnp.asarray(each).astype(total.dtype), sums[0], gradients)
            for level in range(carry):
                carried = sums[level] = tree_map(jnp.add, sums[level], carried)
            if carry < len(sums):
                sums[carry] = carried
            return tuple(sums)

        if len(set(carries)) == 1:
            sums = added(carries[0])
        else:
            branches = [functools.partial(added, carry) for carry in range(carries[-1] + 1)]
            sums = jax.lax.switch(jnp.array(carries)[state.passes], branches)

        def act() -> tuple[Any, AggregationState]:
            total = tree_map(lambda each: each / passes, sums[-1]) if average else sums[-1]
            updates, inner = step(total, state.inner, params, extra)
            return updates, AggregationState(inner, tree_map(jnp.zeros_like, sums), jnp.zeros_like(state.passes))

        def wait() -> tuple[Any, AggregationState]:
            return tree_map(jnp.zeros_like, sums[-1]), AggregationState(state.inner, sums, state.passes + 1)

        # The count is equal on all ranks, so all of them take the same branch.
        return jax.lax.cond(state.passes == passes - 1, act, wait)

    return _transformation(begin, update)


def _transformation(init: Callable[[Any], Any], update: Callable[..., Any]) -> Any:
    optax: Any = sys.modules.get("optax")
    if optax is None:
        return GradientTransformation(init, update)
    return getattr(optax, "GradientTransformationExtraArgs", optax.GradientTransformation)(init, update)
