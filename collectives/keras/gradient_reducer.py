"""The gradients of one step, combined over the ranks in one call, whatever the backend that Keras runs on.

On TensorFlow this is `collectives.tensorflow.gradients`, which knows sparse gradients and graphs. Gradients of JAX and
PyTorch are lists of arrays, and what has to be done with them is the same but for the call that combines them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.runtime import world_of
from collectives.tensors.compression import Compression, check


@dataclass(frozen=True, eq=False)
class GradientSettings:
    """How the gradients of an optimizer are combined; the arguments of `DistributedOptimizer`.

    Attributes:
        passes, average_passes: ``backward_passes_per_step`` and ``average_aggregated_gradients``.
    """

    name: str
    op: Op
    compression: Any
    sparse_as_dense: bool
    predivide: float
    groups: Any
    process_set: ProcessSet
    scale_local: bool
    passes: int
    average_passes: bool
    device_dense: str = ""
    device_sparse: str = ""

    def check(self) -> None:
        """Refuse what makes no sense on any backend.

        Raises:
            ValueError: a factor without Average, or fewer than one pass.
            InvalidTypeError: ``op`` is no operation, or ``compression`` no compressor.
        """
        if not isinstance(self.op, Op):
            raise InvalidTypeError(f"op: expected Average, Sum, Min, Max, Product or Adasum, got {self.op!r}")
        if self.predivide != 1.0 and self.op is not Op.AVERAGE:
            raise InvalidArgumentError("gradient_predivide_factor not supported with op != Average")
        if not isinstance(self.passes, int) or self.passes < 1:
            raise InvalidArgumentError(
                f"backward_passes_per_step: expected an integer of at least 1, got {self.passes!r}"
            )
        check(self.compression)


class GradientReducer(ABC):
    """Combines gradients."""

    @abstractmethod
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        """The combined gradients, with None where there was None; those of ``local`` variables stay this rank's.

        On TensorFlow those that a ``DistributedGradientTape`` has combined stay as they are.

        Raises:
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """


def reducer(settings: GradientSettings, backend: str) -> GradientReducer:
    """What combines gradients of ``backend``: "tensorflow", "jax" or "torch"."""
    settings.check()
    kinds: dict[str, Callable[[GradientSettings], GradientReducer]] = {
        "tensorflow": _TensorFlowReducer,
        "jax": _JaxReducer,
        "torch": _TorchReducer,
    }
    if backend not in kinds:
        raise InvalidArgumentError(
            f"Keras's backend: expected one of {sorted(kinds)}, got {backend!r}; set KERAS_BACKEND"
        )
    return kinds[backend](settings)


class _TensorFlowReducer(GradientReducer):
    def __init__(self, settings: GradientSettings) -> None:
        from collectives.frontends.gradient_options import GradientOptions
        from collectives.tensorflow.gradients import GradientReduction, variable_key
        from collectives.tensorflow.reduction_tracking import reduce_remaining

        self._key, self._reduce_remaining = variable_key, reduce_remaining
        options = GradientOptions(
            op=settings.op,
            compression=settings.compression,
            sparse_as_dense=settings.sparse_as_dense,
            gradient_predivide_factor=settings.predivide,
            groups=settings.groups,
            process_set=settings.process_set,
            scale_local_gradients=settings.scale_local,
            name=settings.name,
        )
        self._reduction = GradientReduction(options)

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        return self._reduce_remaining(grads, variables, self._reduction, {self._key(variable) for variable in local})


class _ArrayReducer(GradientReducer):
    """Of lists of arrays."""

    def __init__(self, settings: GradientSettings) -> None:
        self._settings = settings
        self._groups = _groups(settings.groups)

    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Sequence[Any]) -> list[Any]:
        found, how = list(grads), self._settings
        if not how.process_set.included() or how.process_set.size() == 1:
            return found
        kept = {id(variable) for variable in local}
        places = [at for at, variable in enumerate(variables) if id(variable) not in kept]
        for at in set(range(len(found))) - set(places):
            if how.scale_local and found[at] is not None:
                found[at] = found[at] / how.process_set.size()
        name = self._label([found[at] for at in places])
        present = [at for at in places if found[at] is not None]
        lists = self._lists(present, variables)
        for number, members in enumerate(lists):
            label = f"{name}.{number}" if len(lists) > 1 else name
            results = self._combine([found[at] for at in members], [variables[at] for at in members], label)
            for at, result in zip(members, results, strict=True):
                found[at] = result
        return found

    @abstractmethod
    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]: ...

    def _lists(self, present: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Places of gradients that travel together."""
        if isinstance(self._groups, int):
            count = max(1, min(self._groups, len(present)))
            return [
                present[len(present) * number // count : len(present) * (number + 1) // count]
                for number in range(count)
            ]
        lists = [[at for at in present if id(variables[at]) in group] for group in self._groups]
        named = {at for group in lists for at in group}
        return [group for group in [*lists, [at for at in present if at not in named]] if group]

    def _label(self, grads: list[Any]) -> str:
        """A name that is alike on all ranks in every step, and as a rule another one for another optimizer of the same
        class.

        What is missing is in it: ranks that have gradients of different variables would combine what does not belong
        together, if the shapes happen to agree.
        """
        ends = ["x".join(map(str, grad.shape)) or "scalar" for grad in grads[:1] + grads[-1:] if grad is not None]
        missing = [str(at) for at, grad in enumerate(grads) if grad is None]
        return ".".join([self._settings.name, str(len(grads)), *ends, *(["without", *missing] if missing else [])])


class _JaxReducer(_ArrayReducer):
    """Of arrays, or of tracers inside ``jit``."""

    def __init__(self, settings: GradientSettings) -> None:
        super().__init__(settings)
        from collectives.jax import grouped_allreduce

        self._allreduce = grouped_allreduce

    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]:
        how = self._settings
        return self._allreduce(
            grads,
            op=how.op,
            name=name,
            compression=how.compression,
            prescale_factor=1.0 / how.predivide,
            postscale_factor=how.predivide,
            process_set=how.process_set,
        )


class _TorchReducer(_ArrayReducer):
    """Of tensors: in place where they are the variables' own gradients, which nobody else keeps."""

    def __init__(self, settings: GradientSettings) -> None:
        super().__init__(settings)
        from collectives.torch.compiled import untraced

        self._allreduce = untraced(self._run)

    def _combine(self, grads: list[Any], variables: list[Any], name: str) -> Sequence[Any]:
        own = all(
            grad is getattr(variable.value, "grad", None) for grad, variable in zip(grads, variables, strict=True)
        )
        return self._allreduce(grads, own, name)

    def _run(self, grads: list[Any], in_place: bool, name: str) -> Sequence[Any]:
        how = self._settings
        world = world_of(how.process_set)
        call = world.grouped_allreduce_ if in_place else world.grouped_allreduce
        return call(
            [grad.detach() for grad in grads],
            op=how.op,
            name=name,
            compression=None if how.compression is Compression.none else how.compression,
            prescale_factor=1.0 / how.predivide,
            postscale_factor=how.predivide,
        )


def _groups(groups: Any) -> int | list[set[int]]:
    """What the user says of groups, checked: a number, 0 for none, or the identities of the variables of each list."""
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidArgumentError(
            f"groups should be a non-negative integer or a list of list of variables, got {groups!r}."
        )
    if len({id(variable) for group in groups for variable in group}) < sum(map(len, groups)):
        raise InvalidArgumentError("A variable can only appear once in groups.")
    return [{id(variable) for variable in group} for group in groups]
