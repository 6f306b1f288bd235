"""JAX: ``import collectives.jax as hvd``; collectives on JAX arrays and pytrees, eager and inside `jax.jit`.

    import collectives.jax as hvd

    hvd.init()
    params = hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)     # gradients of all ranks, in one fused call
        return optax.apply_updates(params, updates), state, loss

One process per device: each rank compiles and runs its own program. Horovod has no JAX interface; names and arguments
are those of `collectives.torch`. Optax is needed for nothing but optimizers made with it.
"""

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
    size,
    start_timeline,
    stop_timeline,
)
from collectives.jax import autodiff as _autodiff  # noqa: F401  (gives the primitive its derivatives)
from collectives.jax.gradients import grad, value_and_grad
from collectives.jax.lifecycle import init, shutdown
from collectives.jax.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    reducescatter,
)
from collectives.jax.optimizer import DistributedOptimizer, distributed_gradients
from collectives.jax.state import allgather_object, broadcast_object, broadcast_parameters

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "check_consistency",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "distributed_gradients",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grad",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
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
    "value_and_grad",
]
