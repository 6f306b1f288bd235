"""``tf.keras``: ``import collectives.tensorflow.keras as hvd``, with the names, arguments and habits of Horovod's
interface.

``tf.keras`` is Keras 3, and this is `collectives.keras`; with ``TF_USE_LEGACY_KERAS=1`` in the environment ``tf.keras``
is Keras 2 (the package ``tf_keras``), and this is for that.
"""

import tensorflow as tf

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
    allgather_object,
    barrier,
    broadcast_object,
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
    join,
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
from collectives.tensorflow.functions import broadcast_variables
from collectives.tensorflow.keras import callbacks
from collectives.tensorflow.keras_version import LEGACY

if not LEGACY and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"collectives.tensorflow.keras: Keras runs on {tf.keras.backend.backend()}; import collectives.keras as hvd, "
        "or set KERAS_BACKEND=tensorflow"
    )
if LEGACY:
    from collectives.tensorflow.keras.legacy import DistributedOptimizer, PartialDistributedOptimizer, load_model
    from collectives.tensorflow.keras.legacy_values import (
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        reducescatter,
    )
else:
    from collectives.keras import (
        DistributedOptimizer,
        PartialDistributedOptimizer,
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        load_model,
        reducescatter,
    )

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_device",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
