"""PyTorch: ``import collectives.torch as hvd``, with the names, arguments and conventions of Horovod's interface.

    import collectives.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

Tensors may be on the CPU or on GPUs, in any dtype that the engine supports, bfloat16 included. A script for
``horovod.torch`` runs when its import line is changed; with ``collectivesrun --as-horovod`` not even that (see
`collectives.horovod`).
"""

from collectives import empty_cache, init, is_mapped, shutdown
from collectives.frontends import basics
from collectives.frontends.basics import *  # noqa: F403
from collectives.torch import ddp, elastic, operations, reductions
from collectives.torch.handles import poll, synchronize
from collectives.torch.memory import empty, empty_like, zeros
from collectives.torch.operations import *  # noqa: F403
from collectives.torch.optimizer import DistributedOptimizer
from collectives.torch.optimizer_state import broadcast_optimizer_state
from collectives.torch.reductions import *  # noqa: F403
from collectives.torch.sparse import sparse_allreduce_async
from collectives.torch.state import allgather_object, broadcast_object, broadcast_parameters
from collectives.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ddp",
    "elastic",
    "empty",
    "empty_cache",
    "empty_like",
    "init",
    "is_mapped",
    "poll",
    "shutdown",
    "sparse_allreduce_async",
    "synchronize",
    "zeros",
]
__all__ += operations.__all__
__all__ += reductions.__all__
__all__ += basics.__all__
