"""Reduction of the gradients of one step, in as few operations as possible; used by the tape, the optimizers and Keras.

    gradients        dense                      sparse                  None        of local variables
    reduction        one grouped all-reduce     one grouped             stay None   none: divided by the number of ranks
                     per group                  all-reduce

Gradients are identified by their positions among the variables, so variable names may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.frontends.gradient_options import GradientOptions, split
from collectives.tensorflow import operations
from collectives.tensorflow.errors import unconverted
from collectives.worlds.runtime import communicates, world_of


def variable_key(variable: Any) -> Any:
    """A hashable identity of a variable: TensorFlow's variables compare by value, and Keras's contain one of these."""
    inner = getattr(variable, "value", None)
    return (inner if isinstance(inner, tf.Variable) else variable).ref()


class GradientReduction:
    """Reduces gradients of TensorFlow or Keras variables over the ranks, as `GradientOptions` say.

    Raises:
        InvalidArgumentError: ``options.groups`` is malformed.
    """

    def __init__(self, options: GradientOptions) -> None:
        self.options = options
        self.process_set = options.process_set
        self._groups = options.grouped("variable", "tf.Variable", variable_key)

    @unconverted
    def reduce(self, grads: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> list[Any]:
        """Reduce gradients, eagerly or in a graph. Every rank passes the same variables in the same order.

        Args:
            grads: a tensor, ``tf.IndexedSlices`` or None for each variable; dtypes may differ.
            local: the `variable_key` of each variable whose gradient stays on this rank; other ranks need not have it.

        Returns:
            New tensors, and None where there was None; each row of a sparse gradient occurs once. Ranks outside the
            process set get their own gradients, as does a single rank for dense ones.

        Raises:
            InvalidTypeError: a gradient is neither a tensor nor ``tf.IndexedSlices`` nor None.
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`; also if the
                positions of gradients that are None or sparse differ between ranks.
        """
        options = self.options
        gradients = [
            tf.convert_to_tensor(grad) if options.sparse_as_dense and isinstance(grad, tf.IndexedSlices) else grad
            for grad in grads
        ]
        if not self.process_set.included():
            return gradients
        with world_of(self.process_set).refusing(options.name):
            kinds = [_kind(grad) for grad in gradients]
            if len(gradients) != len(variables):
                raise InvalidArgumentError(
                    f"grads: expected one gradient for each of {len(variables)} variables, got {len(gradients)} [F52]"
                )
        positions = list(range(len(gradients)))
        if local:
            positions = [at for at in positions if variable_key(variables[at]) not in local]
            if options.scale_local_gradients:
                for at in {*range(len(gradients))}.difference(positions):
                    gradients[at] = _divided(gradients[at], self.process_set.size())
        # The name tells which gradients are missing or sparse: ranks that differ in that fail with a mismatch, even if
        # the shapes of what is left happen to agree.
        name = ".".join([options.name, *_exceptions([kinds[at] for at in positions])])
        # A single rank has nothing to reduce in dense gradients, but duplicate rows of sparse ones are still summed.
        dense = [at for at in positions if kinds[at] == "dense"] if communicates(self.process_set) else []
        for number, members in enumerate(split(dense, self._groups, [variable_key(variables[at]) for at in dense])):
            self._allreduce(
                gradients,
                members,
                f"{name}.group.{number}" if self._groups else name,
                compression=options.compression,
                **options.factors,
            )
        sparse = [at for at in positions if kinds[at] == "sparse"]
        if sparse:
            self._allreduce(gradients, sparse, f"{name}.slices")
        return gradients

    def _allreduce(self, gradients: list[Any], positions: list[int], name: str, **how: Any) -> None:
        """Reduce the gradients at some positions by one operation, and put the results there."""
        results = operations.grouped_allreduce(
            [gradients[at] for at in positions],
            op=self.options.op,
            process_set=self.process_set,
            ignore_name_scope=True,
            name=name,
            **how,
        )
        for at, result in zip(positions, results, strict=True):
            gradients[at] = result


def _kind(grad: Any) -> str:
    if grad is None:
        return "none"
    if isinstance(grad, tf.IndexedSlices):
        return "sparse"
    if isinstance(grad, tf.Tensor):
        return "dense"
    raise InvalidTypeError(
        f"gradient: expected a tf.Tensor, tf.IndexedSlices or None, got {type(grad).__name__}; pass one of these [F53]"
    )


def _exceptions(kinds: list[str]) -> list[str]:
    """The runs of positions whose gradients are None or sparse, as ``none-3-5``: characters legal in graph names."""
    runs = []
    for kind, run in groupby(range(len(kinds)), kinds.__getitem__):
        first, *rest = run
        if kind != "dense":
            runs.append("-".join([kind, str(first), *map(str, rest[-1:])]))
    return runs


def _divided(grad: Any, size: int) -> Any:
    if grad is None:
        return None
    if isinstance(grad, tf.IndexedSlices):
        return tf.IndexedSlices(grad.values / size, grad.indices, grad.dense_shape)
    return grad / size
