"""Collective communication in pure Python: ``allreduce(tensor, average=True)`` for any array framework.

    import collectives as hvd

    hvd.init()
    mean = hvd.allreduce(gradient)

Importing this package imports no framework and starts no MPI.
"""

from collectives.api import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_object,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    broadcast_object,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    reducescatter,
    shutdown,
    size,
    world,
)
from collectives.config import Config
from collectives.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    ForkedProcessError,
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    MissingDependencyError,
    NotInitializedError,
    RankFailedError,
    TransportError,
)

__version__ = "0.1.0"

__all__ = [
    "Average",
    "CollectiveTimeoutError",
    "CollectivesError",
    "Config",
    "ForkedProcessError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "Max",
    "Min",
    "MismatchError",
    "MissingDependencyError",
    "NotInitializedError",
    "Product",
    "RankFailedError",
    "Sum",
    "TransportError",
    "__version__",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "shutdown",
    "size",
    "world",
]
