"""What type checkers know of results. Read by mypy, with everything else; never imported.

Classes of this file stand for tensors and optimizers of frameworks that have no types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch.optim as torch_optim
    from typing_extensions import assert_type

    import collectives
    import collectives.jax
    import collectives.keras
    import collectives.tensorflow
    import collectives.torch
    from collectives.engine.handles import Handle

    class Tensor: ...

    class Optimizer: ...

    Float = npt.NDArray[np.float32]

    def the_core(array: Float, tensor: Tensor) -> None:
        assert_type(collectives.allreduce(array), Float)
        assert_type(collectives.allreduce(tensor, op=collectives.Max), Tensor)
        assert_type(collectives.allreduce(1.5), float)
        assert_type(collectives.allreduce_(array), Float)
        assert_type(collectives.broadcast(array, 0), Float)
        assert_type(collectives.broadcast_(array, 0), Float)
        assert_type(collectives.allgather(array), Float)
        assert_type(collectives.reducescatter(array), Float)
        assert_type(collectives.alltoall(array), Float)
        assert_type(collectives.alltoall(array, [1, 2]), tuple[Float, npt.NDArray[np.int64]])
        assert_type(collectives.grouped_allreduce([array, array]), list[Float])
        assert_type(collectives.grouped_broadcast([array, array], 0, name="state"), list[Float])
        assert_type(collectives.broadcast_object("text"), str)
        assert_type(collectives.allgather_object("text"), list[str])

    def messages(array: Float, tensor: Tensor, status: collectives.Status) -> None:
        assert_type(collectives.recv(array, 1, status=status), Float)
        assert_type(collectives.recv(None, 1, like=tensor, shape=(3,)), Tensor)
        assert_type(collectives.recv(None, collectives.ANY_SOURCE), npt.NDArray[Any])
        assert_type(collectives.irecv(tensor, 1).wait(), Tensor)
        assert_type(collectives.irecv(None, 1, like=array).wait(), Float)
        assert_type(collectives.irecv(None, 1, dtype="int32").wait(), npt.NDArray[Any])
        assert_type(collectives.sendrecv(array, 1, tensor, 1), Tensor)
        assert_type(collectives.sendrecv(array, 1, None, 1), Float)
        assert_type(collectives.sendrecv(array, 1, None, 1, like=tensor), Tensor)

    def handles(array: Float, any_handle: Handle) -> None:
        assert_type(collectives.synchronize(collectives.allreduce_async(array)), Float)
        assert_type(collectives.grouped_allreduce_async([array]).wait(), list[Float])
        assert_type(collectives.synchronize(any_handle), Any)

    def ranks_of_a_program(tensor: Tensor) -> None:
        def function(number: int) -> str:
            return str(number)

        assert_type(collectives.run(function, [3], np=2), list[str])
        assert_type(collectives.world().allreduce(tensor), Tensor)
        assert_type(collectives.world().allreduce_async(tensor, op=collectives.Sum).wait(), Tensor)
        collectives.world().broadcast_(tensor, 0, op=collectives.Sum)  # type: ignore[call-arg]
        collectives.allreduce(tensor, prescale=2.0)  # type: ignore[call-arg]

    def torch(tensor: Tensor, optimizer: torch_optim.Adam) -> None:
        hvd = collectives.torch
        assert_type(hvd.allreduce(tensor), Tensor)
        assert_type(hvd.allreduce_(tensor), Tensor)
        assert_type(hvd.synchronize(hvd.allreduce_async(tensor)), Tensor)
        assert_type(hvd.grouped_allreduce([tensor]), list[Tensor])
        assert_type(hvd.alltoall(tensor), Tensor)
        assert_type(hvd.broadcast_object("text"), str)
        assert_type(hvd.DistributedOptimizer(optimizer), torch_optim.Adam)

    def tensorflow(tensor: Tensor, optimizer: Optimizer) -> None:
        hvd = collectives.tensorflow
        assert_type(hvd.allreduce(tensor), Tensor)
        assert_type(hvd.grouped_allreduce([tensor]), list[Tensor])
        assert_type(hvd.alltoall(tensor), Tensor)
        assert_type(hvd.broadcast_object("text"), str)
        assert_type(hvd.DistributedOptimizer(optimizer), Optimizer)
        assert_type(hvd.DistributedGradientTape(tensor), Tensor)

    def keras(tensor: Tensor, optimizer: Optimizer) -> None:
        hvd = collectives.keras
        assert_type(hvd.allreduce(tensor), Tensor)
        assert_type(hvd.DistributedOptimizer(optimizer), Optimizer)
        assert_type(hvd.PartialDistributedOptimizer(optimizer), Optimizer)

    def jax(tree: dict[str, Tensor], optimizer: Optimizer) -> None:
        hvd = collectives.jax
        assert_type(hvd.allreduce(tree), dict[str, Tensor])
        assert_type(hvd.grouped_allreduce([tree]), list[dict[str, Tensor]])
        assert_type(hvd.alltoall(tree), dict[str, Tensor])
        assert_type(hvd.broadcast_parameters(tree), dict[str, Tensor])
        assert_type(hvd.DistributedOptimizer(optimizer), Optimizer)
