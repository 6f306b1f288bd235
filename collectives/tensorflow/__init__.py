"""TensorFlow: ``import collectives.tensorflow as hvd``, with the names, arguments and conventions of Horovod's
TensorFlow interface.

    import collectives.tensorflow as hvd

    hvd.init()
    with tf.GradientTape() as tape:
        loss = ...
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    hvd.broadcast_variables(model.variables, root_rank=0)  # after the first step

Works eagerly, in ``tf.function`` and in graphs for sessions (``tf.compat.v1``). A script for ``horovod.tensorflow``
runs when its import line is changed; with ``collectivesrun --as-horovod`` not even that (see `collectives.horovod`).
"""

import importlib
from typing import TYPE_CHECKING, Any

from collectives import init, shutdown
from collectives.frontends import basics
from collectives.frontends.basics import *  # noqa: F403
from collectives.tensorflow import elastic, functions, operations, rank_queries
from collectives.tensorflow.functions import *  # noqa: F403
from collectives.tensorflow.operations import *  # noqa: F403
from collectives.tensorflow.optimizer import DistributedOptimizer
from collectives.tensorflow.rank_queries import *  # noqa: F403
from collectives.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from collectives.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "elastic",
    "init",
    "shutdown",
]
__all__ += functions.__all__
__all__ += operations.__all__
__all__ += rank_queries.__all__
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    """Define the layer on first use: it needs Keras, which takes seconds to import."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("collectives.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
