"""The gradients of one step, combined over the ranks in one call: what the tape, the optimizers and Keras have in
common.

    gradients            dense            sparse           None        of local layers
    what happens         one fused call   one fused call   stay None   stay here, divided by the number of ranks
                         per group

A gradient is known by its place among the variables, so that nothing depends on how they are called on which rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set, world_of
from collectives.tensorflow import operations
from collectives.tensorflow.autograph import unconverted
from collectives.tensors.compression import Compression, check


@unconverted
def reduce_gradients(
    grads: Sequence[Any],
    variables: Sequence[Any],
    *,
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    local_variables: Iterable[Any] = (),
    device_dense: str = "",
    device_sparse: str = "",
    name: str = "gradients",
) -> list[Any]:
    """Combine gradients over the ranks, eagerly or in a graph; every rank calls it with the same variables in the same
    order.

    Args:
        grads: tensors, ``tf.IndexedSlices`` or None, one for each variable; their dtypes may differ.
        variables: of TensorFlow or Keras.
        local_variables: those whose gradients stay on this rank; the other ranks need not have them.
        name: what the operations are called by.
        op, ...: see `settle`.

    Returns:
        The combined gradients, in new tensors, with None where there was None; sparse ones have each row once. On a
        rank that is not in the process set the gradients themselves, as are dense ones on a rank that is alone.

    Raises:
        ValueError, InvalidTypeError: an argument, or what is no gradient.
        MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`; where the gradients that
            are None or sparse are not the same on all ranks, too.
    """
    how = settle(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
        name=name,
    )
    return how.reduce(grads, variables, {key(variable) for variable in local_variables})


def settle(
    *,
    op: Op = Op.AVERAGE,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    num_groups: int = 0,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    device_dense: str = "",
    device_sparse: str = "",
    name: str = "gradients",
) -> Way:
    """Check how gradients are to be combined.

    Args:
        op: Average, Sum, Min, Max, Product or Adasum; sparse gradients know Average and Sum only.
        compression: `Compression.none`, ``fp16``, ``bf16``, or an own class with ``compress`` and ``decompress``; for
            dense gradients.
        sparse_as_dense: sparse gradients become dense; by default values and indices are gathered.
        gradient_predivide_factor: f divides dense gradients by f before the sum and by size/f afterwards; for Average
            only.
        groups: a number of lists of about equal length, or the lists of variables, whose gradients travel together; in
            lists, what is in none of them makes one more. By default all dense gradients travel together.
        num_groups: Horovod's older name of ``groups``.
        process_set: the ranks that train together; the others keep their gradients.
        scale_local_gradients: divide local gradients by the number of ranks, as befits a loss that is the mean over
            them.
        device_dense, device_sparse: of Horovod's interface; tensors are combined where they are.
        name: what the operations are called by.

    Raises:
        ValueError: a factor without Average, or ``groups`` makes no sense.
        InvalidTypeError: ``op`` is no operation, or ``compression`` no compressor.
    """
    if not isinstance(op, Op):
        raise InvalidTypeError(f"op: expected Average, Sum, Min, Max, Product or Adasum, got {op!r}")
    if gradient_predivide_factor != 1.0 and op is not Op.AVERAGE:
        raise InvalidArgumentError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("num_groups: use groups instead, which takes a number as well", DeprecationWarning, stacklevel=4)
        groups = num_groups if groups is None else groups
    compression = Compression.none if compression is None else compression
    check(compression)
    return Way(
        op,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        _groups(groups),
        process_set,
        scale_local_gradients,
        device_dense,
        device_sparse,
        name,
    )


@dataclass(frozen=True, eq=False)
class Way:
    """How gradients are combined; see `settle`, which makes it."""

    op: Op
    compression: Any
    sparse_as_dense: bool
    predivide: float
    groups: int | tuple[frozenset[Any], ...]
    process_set: ProcessSet
    scale_local: bool
    device_dense: str
    device_sparse: str
    name: str

    @unconverted
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> list[Any]:
        """Combine; see `reduce_gradients`. ``local`` has the `key` of each local variable."""
        found = [
            _dense(grad) if self.sparse_as_dense and isinstance(grad, tf.IndexedSlices) else grad for grad in grads
        ]
        if not self.process_set.included():
            return found
        try:
            kinds = [_kind(grad) for grad in found]
            if len(found) != len(variables):
                raise InvalidArgumentError(f"grads: expected as many as variables, {len(variables)}, got {len(found)}")
        except (InvalidArgumentError, InvalidTypeError) as error:
            raise world_of(self.process_set).refused(error, self.name) from None
        places: Sequence[int] = range(len(found))
        if local:
            places, kept = _parted(variables, local)
            for at in kept:
                if self.scale_local and found[at] is not None:
                    found[at] = _divided(found[at], self.process_set.size())
        dense = [at for at in places if found[at] is not None and not isinstance(found[at], tf.IndexedSlices)]
        if self.process_set.size() == 1:
            dense = []  # they are combined; slices of one row are added up on one rank as they are on several
        sparse = [at for at in places if isinstance(found[at], tf.IndexedSlices)]
        # Ranks that lack gradients of different variables would combine what does not belong together, if the shapes
        # happen to agree. With that in the name their operations do not meet, and the engine says so.
        name = ".".join([self.name, *_unusual([kinds[at] for at in places])])
        for number, members in enumerate(self._grouped(dense, variables)):
            results = operations.grouped_allreduce(
                [found[at] for at in members],
                op=self.op,
                compression=self.compression,
                prescale_factor=1.0 / self.predivide,
                postscale_factor=self.predivide,
                device_dense=self.device_dense,
                process_set=self.process_set,
                ignore_name_scope=True,
                name=f"{name}.group.{number}" if self.groups else name,
            )
            for at, result in zip(members, results, strict=True):
                found[at] = result
        if sparse:
            slices = [found[at] for at in sparse]
            results = operations.grouped_allreduce(
                slices,
                op=self.op,
                device_sparse=self.device_sparse,
                process_set=self.process_set,
                ignore_name_scope=True,
                name=f"{name}.slices",
            )
            for at, result in zip(sparse, results, strict=True):
                found[at] = result
        return found

    def _grouped(self, dense: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Places of gradients that travel together."""
        if isinstance(self.groups, int):
            count = min(self.groups or 1, len(dense))
            return [dense[len(dense) * number // count : len(dense) * (number + 1) // count] for number in range(count)]
        keys = {at: key(variables[at]) for at in dense}
        lists = [[at for at in dense if keys[at] in group] for group in self.groups]
        named = {at for group in lists for at in group}
        return [group for group in [*lists, [at for at in dense if at not in named]] if group]


def key(variable: Any) -> Any:
    """What a variable is known by: TensorFlow's are compared by value, and Keras has its own around them."""
    inner = getattr(variable, "value", None)
    return (inner if isinstance(inner, tf.Variable) else variable).ref()


def _groups(groups: Any) -> int | tuple[frozenset[Any], ...]:
    """What the user says of groups, checked: a number, 0 for none, or the keys of the variables of each list."""
    if groups is None:
        return 0
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise InvalidArgumentError(
            f"groups should be a non-negative integer or a list of list of tf.Variable, got {groups!r}."
        )
    try:
        keys = [key(variable) for group in groups for variable in group]
    except AttributeError:
        raise InvalidArgumentError("groups must consist of tf.Variable.") from None
    if len(set(keys)) < len(keys):
        raise InvalidArgumentError("A variable can only appear once in groups.")
    return tuple(frozenset(map(key, group)) for group in groups)


def _parted(variables: Sequence[Any], local: Collection[Any]) -> tuple[list[int], list[int]]:
    """The places of variables of all ranks, and of those of this one."""
    here = [key(variable) in local for variable in variables]
    return [at for at, mine in enumerate(here) if not mine], [at for at, mine in enumerate(here) if mine]


def _kind(grad: Any) -> str:
    if grad is None:
        return "none"
    if isinstance(grad, tf.IndexedSlices):
        return "sparse"
    if isinstance(grad, tf.Tensor):
        return ""
    raise InvalidTypeError(
        f"gradient: expected a tf.Tensor, tf.IndexedSlices or None, got {type(grad).__name__}; it cannot be combined"
    )


def _unusual(kinds: list[str]) -> list[str]:
    """Which gradients are missing or sparse, by their places: ``none-3-5``, in characters that a name in a graph may
    have."""
    runs = []
    place = 0
    for kind, run in groupby(kinds):
        length = len(list(run))
        if kind:
            runs.append(f"{kind}-{place}" if length == 1 else f"{kind}-{place}-{place + length - 1}")
        place += length
    return runs


def _dense(grad: Any) -> Any:
    return tf.convert_to_tensor(grad)


def _divided(grad: Any, size: int) -> Any:
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / size, grad.indices, grad.dense_shape)
    return grad / size
