"""`DistributedGradientTape`: a tape whose gradients are those of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensorflow.autograph import unconverted
from collectives.tensorflow.gradients import Way, key, settle
from collectives.tensorflow.reduction_tracking import note
from collectives.tensors.compression import Compression

Tape = TypeVar("Tape", bound=tf.GradientTape)


@unconverted
def DistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Tape:
    """Wrap a ``tf.GradientTape``, so that ``gradient()`` gives the gradients of all ranks, combined in one call.

    The tape may have recorded already, be recording, or be used in a ``with`` statement afterwards; it and the result
    are one tape::

        with tf.GradientTape() as tape:
            loss = loss_of(model(images), labels)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    ``jacobian`` and ``batch_jacobian`` are those of this rank. What `gradient` returns is differentiable, as
    `allreduce` is, for an outer tape. A loss that was scaled for float16 gives gradients that are scaled, and overflow
    on all ranks if they do on one.

    Args:
        gradtape: of ``tf.GradientTape`` or a subclass.
        device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set,
            scale_local_gradients: see `collectives.tensorflow.gradients.settle`.

    Returns:
        A tape of a subclass of the given tape's type, with ``register_local_source(source)`` and
        ``get_local_and_global_gradients(target, sources)``.

    Raises:
        ValueError, InvalidTypeError: an argument makes no sense.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidTypeError(f"gradtape: expected a tf.GradientTape, got {type(gradtape).__name__}")
    if isinstance(gradtape, _Distributed):
        raise InvalidArgumentError(
            "gradtape: expected a tf.GradientTape, got one that DistributedGradientTape has wrapped already"
        )
    way = settle(
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        device_dense=device_dense,
        device_sparse=device_sparse,
    )
    kind: Any = type(gradtape)
    tape: Any = object.__new__(_distributed(kind))
    tape.__dict__ = gradtape.__dict__  # one state: whichever is entered or asked, the other knows
    tape._rank_tape, tape._way, tape._local_sources = gradtape, way, set()
    return tape


@unconverted
def PartialDistributedGradientTape(
    gradtape: Tape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Op.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Tape:
    """`DistributedGradientTape` for a model some of whose layers are this rank's own: their gradients are not combined.

    Args:
        local_layers: a Keras layer, or several; they are built already, since they are known by their trainable
            weights.
        gradtape, ...: as for `DistributedGradientTape`.

    Raises:
        ValueError: what is no layer; and all that `DistributedGradientTape` raises.
    """
    sources = trainable_weights(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for source in sources:
        tape.register_local_source(source)
    return tape


def trainable_weights(layers: Any) -> list[Any]:
    """The trainable weights of a layer, of several, or of None.

    Raises:
        InvalidArgumentError: what is no layer, or has not been built.
    """
    if layers is None:
        return []
    found = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, tf.Module) else [layers]
    for layer in found:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidArgumentError(f"local_layers: expected layers of tf.keras.layers.Layer type, got {layer!r}")
        if not getattr(layer, "built", True):
            raise InvalidArgumentError(
                f"local_layers: {layer!r} has no weights yet; build it, or call the model once, before"
            )
    return [weight for layer in found for weight in layer.trainable_weights]


class _Distributed:
    """What is put before a tape's class."""

    _rank_tape: Any
    _way: Way
    _local_sources: set[Any]

    @unconverted
    def register_local_source(self, source: Any) -> None:
        """The gradients of a variable stay on this rank, divided by the number of ranks if
        ``scale_local_gradients``."""
        self._local_sources.add(key(source))

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """The gradients of all ranks; as ``tf.GradientTape.gradient``, in the structure of ``sources``.

        Every rank calls it with the same sources; those that are unconnected, None, are so on all ranks.

        Args:
            use_generic_names: of Horovod's interface; names never depend on those of variables.

        Raises:
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.allreduce`.
        """
        grads = self._rank_tape.gradient(
            target, sources, output_gradients=output_gradients, unconnected_gradients=unconnected_gradients
        )
        if (
            isinstance(sources, list)
            and type(grads) is list
            and not any(isinstance(source, (list, tuple, dict)) for source in sources)
        ):
            return self._reduce(grads, sources)
        return tf.nest.pack_sequence_as(sources, self._reduce(tf.nest.flatten(grads), tf.nest.flatten(sources)))

    def _reduce(self, grads: list[Any], sources: list[Any]) -> list[Any]:
        reduced = self._way.reduce(grads, sources, self._local_sources)
        note(reduced, sources, self._way.process_set)
        return reduced

    @unconverted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """`gradient`, as pairs of source and gradient: those of local sources, and the others."""
        flat = tf.nest.flatten(sources)
        grads = self.gradient(target, flat, output_gradients)
        pairs = list(zip(flat, grads, strict=True))
        local = [pair for pair in pairs if key(pair[0]) in self._local_sources]
        return local, [pair for pair in pairs if key(pair[0]) not in self._local_sources]

    @unconverted
    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's; as ``tf.GradientTape.jacobian``, which asks `gradient` for rows that are not to be combined."""
        return self._rank_tape.jacobian(*args, **kwargs)

    @unconverted
    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's; as ``tf.GradientTape.batch_jacobian``."""
        return self._rank_tape.batch_jacobian(*args, **kwargs)


@functools.cache
def _distributed(kind: type[Any]) -> type[Any]:
    """The class of a wrapped tape; what it adds is in slots, because its ``__dict__`` is the wrapped tape's own."""
    return type(
        kind.__name__,
        (_Distributed, kind),
        {"__slots__": ("_local_sources", "_rank_tape", "_way"), "__module__": __name__},
    )
