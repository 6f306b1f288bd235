"""TensorFlow: ``import collectives.tensorflow as hvd``, with the names, arguments and habits of Horovod's TensorFlow
interface.

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
from typing import Any

from collectives import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    check_consistency,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_device,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
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

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
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
    "ccl_built",
    "check_consistency",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_device",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> Any:
    """The layer is made when it is asked for: it needs Keras, which takes seconds to import, and not every program
    uses."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("collectives.tensorflow.sync_batch_norm").SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
