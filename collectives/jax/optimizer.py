"""Optax's optimizers on the gradients of all ranks.

    distributed_gradients(...)             a transformation of its own, for `optax.chain`
    DistributedOptimizer(optimizer, ...)   the same before an optimizer, with gradients added up over several passes if wanted

All gradients of a step travel in one fused call. Optax itself is not needed: a transformation is a pair of functions.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.jax.operations import allreduce
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensors.compression import Compression

Optimizer = TypeVar("Optimizer")

_numbers = itertools.count()


class GradientTransformation(NamedTuple):
    """A pair of functions with Optax's names, for where Optax is not."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class EmptyState(NamedTuple):
    """Of a transformation that remembers nothing."""


class AggregationState(NamedTuple):
    """Of an optimizer that acts on every few passes.

    Attributes:
        inner: the optimizer's.
        sums: this rank's gradients since its last step.
        passes: how many they are.
    """

    inner: Any
    sums: Any
    passes: Any


def distributed_gradients(
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    *,
    ordered: bool = True,
    algorithm: str | None = None,
    transport: str | None = None,
) -> GradientTransformation:
    """A gradient transformation that combines the ranks' gradients, all in one fused call.

    ``optax.chain(hvd.distributed_gradients(), optax.clip_by_global_norm(1.0), optax.adam(1e-3))`` clips what all ranks
    found together.

    Args:
        op: Average (the default), Sum, Min, Max, Product or Adasum.
        compression: `Compression.fp16` or ``bf16``, or an own one.
        gradient_predivide_factor: of Average: divides before the sum, and the rest of the number of ranks after it.
        process_set: the ranks that take part.
        name: of the operation; None: one that tells this transformation from others, which every rank makes in the same
            order.
        ordered: False: the call is matched by that name alone, and a compiled step starts by JAX's quick path. Then
            make a transformation for each model, and read a result of the last step before `shutdown`, `join` and the
            end of the program, which cannot wait for what JAX keeps no account of: see `collectives.jax.operations`.
        algorithm, transport: as for `collectives.jax.allreduce`.

    Returns:
        A transformation: Optax's own type where Optax has been imported. Its state is empty.

    Raises:
        InvalidArgumentError: a factor without Average.
    """
    scales = _scales(op, gradient_predivide_factor)
    number = next(_numbers)
    label = name if name is not None or ordered else f"distributed_gradients.{number}"

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        how = None, label, compression, op, *scales, process_set
        return allreduce(updates, *how, ordered=ordered, algorithm=algorithm, transport=transport), state

    return _transformation(lambda params: EmptyState(), update)


def DistributedOptimizer(
    optimizer: Optimizer,
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    name: str | None = None,
    *,
    ordered: bool = True,
    algorithm: str | None = None,
    transport: str | None = None,
) -> Optimizer:
    """An Optax optimizer that steps by the gradients of all ranks.

    With Adasum each rank's optimizer acts on its own gradients, and what it makes of them is combined.

    What optimizers of Optax take beside the gradients is combined as well, since ranks that go by losses of their own
    would part: ``value`` (of ``optax.contrib.reduce_on_plateau`` and others), ``grad`` and ``value_fn`` (of line
    searches, as in ``optax.lbfgs``).

    Args:
        optimizer: with ``init(params)`` and ``update(gradients, state, params)``.
        op, compression, gradient_predivide_factor, process_set, name, ordered, algorithm, transport: as for
        `distributed_gradients`.
        backward_passes_per_step: gradients of so many updates are added up on the rank before they are combined and the
            optimizer acts; in between the updates are zeros.
        average_aggregated_gradients: divide that sum by their number.

    Returns:
        A transformation with the same functions: Optax's own type where Optax has been imported. Its state holds the
            optimizer's.

    Raises:
        InvalidTypeError: ``optimizer`` is none.
        InvalidArgumentError: fewer than one pass; a factor without Average; in an update, what cannot be combined as
            said above.
    """
    given: Any = optimizer
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise InvalidTypeError(f"optimizer: expected an Optax optimizer, with init and update, got {optimizer!r}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise InvalidArgumentError(
            f"backward_passes_per_step: expected a number from 1 up, got {backward_passes_per_step!r}"
        )
    combined = distributed_gradients(
        op,
        compression,
        gradient_predivide_factor,
        process_set,
        name,
        ordered=ordered,
        algorithm=algorithm,
        transport=transport,
    )
    number = next(_numbers)

    def mean(values: Any) -> Any:
        label = f"distributed_values.{number}" if name is None else f"{name}.values"
        return allreduce(values, name=label, op=Op.AVERAGE, process_set=process_set, ordered=ordered)

    def step(gradients: Any, state: Any, params: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if op is Op.ADASUM:
            updates, state = given.update(gradients, state, params, **extra)
            return combined.update(updates, None)[0], state
        gradients = combined.update(gradients, None)[0]
        if not extra.keys().isdisjoint(_LOSSES):
            _check_losses(extra, op, backward_passes_per_step)
            extra = {**extra, **_of_all_ranks(extra, gradients, mean)}
        found: tuple[Any, Any] = given.update(gradients, state, params, **extra)
        return found

    if backward_passes_per_step == 1:
        return _transformation(
            given.init, lambda gradients, state, params=None, **extra: step(gradients, state, params, extra)
        )
    return _aggregating(given.init, step, backward_passes_per_step, average_aggregated_gradients)


_LOSSES = ("value", "grad", "value_fn")
"""What Optax calls a loss, its gradient and the function of both in the further arguments of an update."""


def _check_losses(extra: dict[str, Any], op: Op, passes: int) -> None:
    """Refuse what would be one rank's alone."""
    named = [name for name in _LOSSES if name in extra]
    if op is not Op.AVERAGE:
        raise InvalidArgumentError(
            f"{', '.join(named)}: expected op=Average, got op={op!r}; else put distributed_gradients(op=...) into "
            f"optax.chain before the"
            " optimizer, and give the update what is alike on all ranks"
        )
    if passes > 1 and named != ["value"]:
        raise InvalidArgumentError(
            f"{', '.join(named)}: expected backward_passes_per_step=1, got {passes}: a line search has one batch"
        )


def _of_all_ranks(extra: dict[str, Any], gradients: Any, mean: Callable[[Any], Any]) -> dict[str, Any]:
    """The means over the ranks of losses; ``gradients`` are combined already."""
    found: dict[str, Any] = {}
    if "value" in extra:
        found["value"] = mean(extra["value"])
    if "grad" in extra:
        found["grad"] = gradients
    if "value_fn" in extra:
        value_fn = extra["value_fn"]
        # All ranks have the same parameters, so that the inner mean changes nothing but the gradient: that becomes the
        # mean as well.
        found["value_fn"] = lambda params, *arguments, **keywords: mean(value_fn(mean(params), *arguments, **keywords))
    return found


def _aggregating(init: Callable[[Any], Any], step: Callable[..., Any], passes: int, average: bool) -> Any:
    """An optimizer that acts on every few passes."""

    def begin(params: Any) -> AggregationState:
        return AggregationState(init(params), jax.tree_util.tree_map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))

    def update(
        gradients: Any, state: AggregationState, params: Any = None, **extra: Any
    ) -> tuple[Any, AggregationState]:
        sums = jax.tree_util.tree_map(
            lambda total, each: total + jnp.asarray(each).astype(total.dtype), state.sums, gradients
        )

        def act() -> tuple[Any, AggregationState]:
            total = jax.tree_util.tree_map(lambda each: each / passes, sums) if average else sums
            updates, inner = step(total, state.inner, params, extra)
            return updates, AggregationState(
                inner, jax.tree_util.tree_map(jnp.zeros_like, sums), jnp.zeros_like(state.passes)
            )

        def wait() -> tuple[Any, AggregationState]:
            return jax.tree_util.tree_map(jnp.zeros_like, sums), AggregationState(state.inner, sums, state.passes + 1)

        # All ranks have counted alike, so that all of them take the same branch.
        found: tuple[Any, AggregationState] = jax.lax.cond(state.passes == passes - 1, act, wait)
        return found

    return _transformation(begin, update)


def _scales(op: Op, predivide: float) -> tuple[float, float]:
    """The factors before and after the sum."""
    if predivide == 1.0:
        return 1.0, 1.0
    if op is not Op.AVERAGE:
        raise InvalidArgumentError(
            f"gradient_predivide_factor: expected 1.0 with op={op!r}, got {predivide}; it divides an Average in two "
            f"steps"
        )
    return 1.0 / predivide, float(predivide)


def _transformation(init: Callable[[Any], Any], update: Callable[..., Any]) -> Any:
    optax: Any = sys.modules.get("optax")
    if optax is None:
        return GradientTransformation(init, update)
    return getattr(optax, "GradientTransformationExtraArgs", optax.GradientTransformation)(init, update)
