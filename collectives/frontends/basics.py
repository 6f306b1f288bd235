"""Names of `collectives` that every adapter exports unchanged."""

# ruff: noqa: F405

from collectives.public import *  # noqa: F403
from collectives.worlds import capabilities
from collectives.worlds.capabilities import *  # noqa: F403
from collectives.worlds.runtime import is_homogeneous

__all__ = [
    "ANY_SOURCE",
    "ANY_TAG",
    "Adasum",
    "Average",
    "Compression",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Status",
    "Sum",
    "add_process_set",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "irecv",
    "is_homogeneous",
    "is_initialized",
    "isend",
    "local_device",
    "local_rank",
    "local_size",
    "rank",
    "recv",
    "remove_process_set",
    "send",
    "sendrecv",
    "size",
    "start_timeline",
    "stop_timeline",
]
__all__ += capabilities.__all__
