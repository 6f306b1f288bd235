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
from collectives.tensorflow.functions import (
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from collectives.tensorflow.hooks import BroadcastGlobalVariablesHook
from collectives.tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    check_num_rank_power_of_2,
    gpu_available,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from collectives.tensorflow.optimizer import DistributedOptimizer
from collectives.tensorflow.rank_queries import local_rank_op, local_size_op, process_set_included_op, rank_op, size_op
from collectives.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

if TYPE_CHECKING:
    from collectives.tensorflow.sync_batch_norm import SyncBatchNormalization

__all__ = [
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "shutdown",
    "size_op",
]
__all__ += basics.__all__


def __getattr__(name: str) -> Any:
    """Define the layer on first use: it needs Keras, which takes seconds to import."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("collectives.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
