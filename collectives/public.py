"""The public names, which the package re-exports (see its ``__init__``). `docs/api.md` lists them by subject.

The package also has `poll` and `synchronize`, which are not in ``__all__``: they repeat methods of a handle.
"""
# ruff: noqa: F403, F405  (``__all__`` is the list)

from collectives.algorithms import register_algorithm
from collectives.api import *
from collectives.base.config import Config
from collectives.base.errors import *
from collectives.engine.handles import Handle
from collectives.engine.messages.matching import ANY_SOURCE, ANY_TAG
from collectives.engine.messages.transfers import Status
from collectives.point_to_point import irecv, isend, recv, send, sendrecv
from collectives.tensors.compression import Compression
from collectives.worlds.local_world import LocalWorld, local_world
from collectives.worlds.memory import empty, empty_like, is_mapped, zeros
from collectives.worlds.persistent import PersistentOperation
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import *
from collectives.worlds.start import run

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Adasum",
    "Average",
    "CollectiveTimeoutError",
    "CollectivesError",
    "Compression",
    "Config",
    "ForkedProcessError",
    "Handle",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LocalWorld",
    "Max",
    "Min",
    "MismatchError",
    "MissingDependencyError",
    "NotInitializedError",
    "OperationError",
    "OutOfMemoryError",
    "PersistentOperation",
    "ProcessSet",
    "Product",
    "RankFailedError",
    "RecoverableError",
    "Status",
    "Sum",
    "TransportError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_init",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "allreduce_init",
    "alltoall",
    "alltoall_async",
    "alltoall_init",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_init",
    "broadcast_object",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "empty",
    "empty_cache",
    "empty_like",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allgather_init",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_allreduce_init",
    "grouped_broadcast",
    "grouped_broadcast_",
    "grouped_broadcast_async",
    "grouped_broadcast_async_",
    "grouped_broadcast_init",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "grouped_reducescatter_init",
    "init",
    "irecv",
    "is_initialized",
    "is_mapped",
    "isend",
    "join",
    "local_device",
    "local_rank",
    "local_size",
    "local_world",
    "rank",
    "recv",
    "reducescatter",
    "reducescatter_async",
    "reducescatter_init",
    "register_algorithm",
    "remove_process_set",
    "run",
    "send",
    "sendrecv",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "world",
    "zeros",
]
