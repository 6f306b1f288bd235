"""A communication hook for ``DistributedDataParallel``: torch keeps its wrapper, its buckets and its overlap, our
engine moves the bytes.

    model = DistributedDataParallel(model)    # any process group of the same ranks; gloo will do
    model.register_comm_hook(None, hvd.ddp.allreduce_hook)
    # or with settings:
    model.register_comm_hook(hvd.ddp.AllreduceState(compression=hvd.Compression.bf16), hvd.ddp.allreduce_hook)

Torch calls the hook as soon as the gradients of a bucket are complete. The all-reduce runs in the background during the
backward pass, and completes a future. At the end of the backward pass torch would sleep until the futures are done.
Before that, a callback has this thread wait for the operations, so that it drives the engine
(`collectives.engine.progress`) and raises their errors with their own types.

All other communication of ``DistributedDataParallel`` (parameters at the start, buffers, which parameters were used)
goes through its process group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from collectives.base.reduce_op import Op
from collectives.tensors.compression import Compression
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set, world_of

_numbers: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()
"""The numbers of the states of each process set, equal on its ranks."""


@dataclass
class AllreduceState:
    """How a model's gradients are combined; every rank of the process set creates the same states in the same order.

    Args:
        op: Average, as ``DistributedDataParallel`` has it, Sum, Adasum, ...
        compression: as for `collectives.torch.allreduce`.
        prescale_factor, postscale_factor: multiply them before and after.
        process_set: the ranks of the model's process group.
        name: of the model, for messages and the timeline. Several models whose gradients may be in flight at once need
            different ones; by default the states are numbered.
    """

    op: Op = Op.AVERAGE
    compression: Any = Compression.none
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: ProcessSet = global_process_set
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is None:
            self.name = f"ddp.{next(_numbers.setdefault(self.process_set, itertools.count(1)))}"


_DEFAULT = AllreduceState(name="ddp")


def allreduce_hook(state: AllreduceState | None, bucket: Any) -> Any:
    """All-reduce a bucket of gradients in place; for ``DistributedDataParallel.register_comm_hook``.

    Args:
        state: how; None: their average, for the only model.
        bucket: a ``torch.distributed.GradBucket``, on the CPU or a GPU.

    Returns:
        A ``torch.futures.Future`` of the bucket's tensor; on a GPU complete when the work has been issued, as torch's
        own are.

    Raises:
        NotInitializedError, InvalidArgumentError: at once; what the ranks can only find out together is raised by
            ``backward()``:
        MismatchError, RankFailedError, CollectiveTimeoutError.
    """
    state = state or _DEFAULT
    gradients = bucket.buffer()
    handle = world_of(state.process_set).allreduce_async_(
        gradients,
        op=state.op,
        name=f"{state.name}.bucket.{bucket.index()}",
        prescale_factor=state.prescale_factor,
        postscale_factor=state.postscale_factor,
        compression=state.compression,
    )
    done: torch.futures.Future[None] = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
    # Fetched in a continuation, for which torch sets a stream aside: the stream of backward does not wait for the
    # result. What the continuation raises is the error of its future, also for those who wait in C++.
    result = done.then(lambda _: handle.wait())
    handle.add_done_callback(lambda _: done.set_result(None))
    # Not where a rank that has run out of data stands in for its backward pass.
    if torch._C._current_graph_task_id() >= 0:
        torch.autograd.Variable._execution_engine.queue_callback(handle.wait)
    return result


allreduce_hook.__annotations__.clear()  # torch accepts its own classes there, or nothing; these are strings
