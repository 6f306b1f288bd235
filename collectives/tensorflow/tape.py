"""`DistributedGradientTape`: a ``tf.GradientTape`` whose gradients are reduced over the ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from collectives.base.errors import InvalidArgumentError, InvalidTypeError
from collectives.base.reduce_op import Op
from collectives.frontends.gradient_options import GradientOptions
from collectives.frontends.keras_optimizer import local_weights
from collectives.tensorflow.errors import unconverted
from collectives.tensorflow.gradients import GradientReduction, variable_key
from collectives.tensorflow.reduction_tracking import mark
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set

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
    algorithm: str | None = None,
) -> Tape:
    """Wrap a ``tf.GradientTape``, so that ``gradient()`` returns gradients reduced over the ranks, by one call.

    The tape may have recorded already, be recording, or be used in a ``with`` statement afterwards; the result shares
    its state::

        with tf.GradientTape() as tape:
            loss = loss_of(model(images), labels)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

    ``jacobian`` and ``batch_jacobian`` are this rank's. The result of ``gradient`` is differentiable for an outer tape,
    as `allreduce` is. Gradients of a loss scaled for float16 are scaled; if they overflow on one rank, they do on all.

    Args:
        gradtape: a ``tf.GradientTape`` or of a subclass.
        compression, ...: as for `collectives.frontends.gradient_options.GradientOptions`.

    Returns:
        A tape of a subclass of the given tape's type, with ``register_local_source(source)`` and
        ``get_local_and_global_gradients(target, sources)``.

    Raises:
        InvalidArgumentError (a ValueError), InvalidTypeError: an invalid argument, or the tape is wrapped already.
    """
    return _wrapped(gradtape, GradientOptions.of(locals()))


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
    """`DistributedGradientTape` for a model with layers of this rank alone, whose gradients are not reduced.

    Args:
        local_layers: a built Keras layer, or several; their trainable weights become local sources.
        gradtape, ...: as for `DistributedGradientTape`.

    Raises:
        InvalidArgumentError (a ValueError): not a layer, or not built; and all that `DistributedGradientTape` raises.

    Example:
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=[model.layers[0]])
    """
    sources = local_weights(local_layers)
    tape: Any = _wrapped(gradtape, GradientOptions.of(locals()))
    for source in sources:
        tape.register_local_source(source)
    return tape


def _wrapped(gradtape: Any, options: GradientOptions) -> Any:
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidTypeError(f"gradtape: expected a tf.GradientTape, got {type(gradtape).__name__} [F13]")
    if isinstance(gradtape, _WrappedTape):
        raise InvalidArgumentError(
            "gradtape: expected a tf.GradientTape, got one that DistributedGradientTape has wrapped already; wrap it "
            "only once [F14]"
        )
    inner: Any = type(gradtape)
    tape: Any = object.__new__(_subclass(inner))
    tape.__dict__ = gradtape.__dict__  # both objects have one state
    tape._rank_tape, tape._reduction, tape._local_sources = gradtape, GradientReduction(options), set()
    return tape


class _WrappedTape:
    """Precedes the tape's own class among the bases of a wrapped tape."""

    _rank_tape: Any
    _reduction: GradientReduction
    _local_sources: set[Any]

    @unconverted
    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a variable on this rank, divided by ``size()`` if ``scale_local_gradients``."""
        self._local_sources.add(variable_key(source))

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, with gradients reduced over the ranks, in the structure of ``sources``.

        Every rank passes the same sources, and the same of them are unconnected (None).

        Args:
            use_generic_names: part of Horovod's interface; operation names never depend on variable names.

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
        reduced = self._reduction.reduce(grads, sources, self._local_sources)
        mark(reduced, sources, self._reduction.process_set)
        return reduced

    @unconverted
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """`gradient` as two lists of pairs of source and gradient: of local sources, and of the others."""
        flat = tf.nest.flatten(sources)
        grads = self.gradient(target, flat, output_gradients)
        pairs = list(zip(flat, grads, strict=True))
        local = [pair for pair in pairs if variable_key(pair[0]) in self._local_sources]
        return local, [pair for pair in pairs if variable_key(pair[0]) not in self._local_sources]

    @unconverted
    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's ``tf.GradientTape.jacobian``, which calls ``gradient`` for rows that are not to be reduced."""
        return self._rank_tape.jacobian(*args, **kwargs)

    @unconverted
    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's ``tf.GradientTape.batch_jacobian``."""
        return self._rank_tape.batch_jacobian(*args, **kwargs)


@functools.cache
def _subclass(tape: type[Any]) -> type[Any]:
    """The class of a wrapped tape. Its own attributes are slots: the ``__dict__`` is shared with the inner tape."""
    members = {"__slots__": ("_local_sources", "_rank_tape", "_reduction"), "__module__": __name__}
    return type(tape.__name__, (_WrappedTape, tape), members)
