"""Combine the gradients of one step over the ranks in one call, on each of Keras's backends.

TensorFlow's sparse gradients and graphs are handled by `collectives.tensorflow.gradients`. Gradients of JAX and PyTorch
are lists of arrays, and differ only in the call that combines them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.elastic import retry
from collectives.frontends.gradient_options import GradientOptions, split
from collectives.worlds.runtime import communicates, world_of


class GradientReducer(ABC):
    """Combines the gradients of an optimizer."""

    @abstractmethod
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        """Return the combined gradients, with None where there was None; those of ``local`` variables stay this rank's.

        On TensorFlow, gradients that a ``DistributedGradientTape`` has combined are returned unchanged.
        """

    def densified(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Return gradients of which none is sparse; a sparse one is refused without ``sparse_as_dense``."""
        return grads


def gradient_reducer(options: GradientOptions, backend: str) -> GradientReducer:
    """Return the reducer for a backend.

    Raises:
        InvalidArgumentError: another backend, or ``groups`` is neither a number nor lists of variables.
    """
    reducers: dict[str, Callable[[GradientOptions], GradientReducer]] = {
        "tensorflow": _TensorFlowReducer,
        "jax": _JaxReducer,
        "torch": _TorchReducer,
    }
    if backend not in reducers:
        raise InvalidArgumentError(
            f"Keras's backend: expected one of {sorted(reducers)}, got {backend!r}; set KERAS_BACKEND before "
            "importing keras [F2]"
        )
    return reducers[backend](options)


class _TensorFlowReducer(GradientReducer):
    def __init__(self, options: GradientOptions) -> None:
        from collectives.tensorflow.gradients import GradientReduction, variable_key
        from collectives.tensorflow.optimizer_reduction import densified
        from collectives.tensorflow.reduction_tracking import reduce_remaining

        self._key, self._reduce_remaining, self._densified = variable_key, reduce_remaining, densified
        self._reduction = GradientReduction(options)

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        return self._reduce_remaining(grads, variables, self._reduction, {self._key(variable) for variable in local})

    def densified(self, grads: Sequence[Any]) -> Sequence[Any]:
        return self._densified(grads, self._reduction.options)


class _ArrayReducer(GradientReducer):
    """Combines lists of arrays."""

    def __init__(self, options: GradientOptions) -> None:
        self._options = options
        self._keywords: dict[str, Any] = {"op": options.op, "compression": options.compression, **options.factors}
        self._groups = options.grouped()

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        reduced, process_set = list(grads), self._options.process_set
        if not communicates(process_set):
            return reduced
        local_ids = {id(variable) for variable in local}
        shared = [at for at, variable in enumerate(variables) if id(variable) not in local_ids]
        for at in set(range(len(reduced))) - set(shared):
            if self._options.scale_local_gradients and reduced[at] is not None:
                reduced[at] = reduced[at] / process_set.size()
        name = self._operation_name([reduced[at] for at in shared])
        present = [at for at in shared if reduced[at] is not None]
        groups = split(present, self._groups, [id(variables[at]) for at in present])
        for number, members in enumerate(groups):
            label = f"{name}.{number}" if len(groups) > 1 else name
            results = self._combine([reduced[at] for at in members], [variables[at] for at in members], label)
            for at, result in zip(members, results, strict=True):
                reduced[at] = result
        return reduced

    @abstractmethod
    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]: ...

    def _operation_name(self, grads: list[Any]) -> str:
        """Return a name that is equal on all ranks in every step, and usually differs between optimizers of a class.

        It contains which gradients are missing: ranks with gradients of different variables would otherwise combine
        unrelated ones if their shapes happen to agree.
        """
        ends = ["x".join(map(str, grad.shape)) or "scalar" for grad in grads[:1] + grads[-1:] if grad is not None]
        missing = [str(at) for at, grad in enumerate(grads) if grad is None]
        return ".".join([self._options.name, str(len(grads)), *ends, *(["without", *missing] if missing else [])])


class _JaxReducer(_ArrayReducer):
    """Combines arrays, or tracers inside ``jit``."""

    def __init__(self, options: GradientOptions) -> None:
        super().__init__(options)
        from collectives.jax import grouped_allreduce

        self._allreduce = grouped_allreduce

    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]:
        return self._allreduce(grads, name=name, process_set=self._options.process_set, **self._keywords)


class _TorchReducer(_ArrayReducer):
    """Combines tensors; in place if they are the variables' own gradients, to which nothing else holds a reference."""

    def __init__(self, options: GradientOptions) -> None:
        super().__init__(options)
        from collectives.torch.compiled import untraced

        self._allreduce = untraced(self._run)

    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]:
        own = all(
            grad is getattr(variable.value, "grad", None) for grad, variable in zip(grads, variables, strict=True)
        )
        return self._allreduce(grads, own, name)

    def _run(self, grads: list[Any], in_place: bool, name: str) -> Sequence[Any]:
        world = world_of(self._options.process_set)
        gradients = [grad.detach() for grad in grads]
        steps = retry.steps(self._options.process_set, self._options.op)
        if steps is not None:  # in place nothing would be left to combine again
            return steps.reduce(name, lambda world: world.grouped_allreduce(gradients, name=name, **self._keywords))
        allreduce = world.grouped_allreduce_ if in_place else world.grouped_allreduce
        return allreduce(gradients, name=name, **self._keywords)
