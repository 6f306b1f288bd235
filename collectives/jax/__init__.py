"""JAX: ``import collectives.jax as hvd``; collectives on JAX arrays and pytrees, eager and inside `jax.jit`.

    import collectives.jax as hvd

    hvd.init()
    params = hvd.broadcast_parameters(params, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))

    @jax.jit
    def step(params, state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)     # the gradients of all ranks, in one fused call
        return optax.apply_updates(params, updates), state, loss

Run one process per device; each rank compiles and runs its own program. Horovod has no JAX interface; names and
arguments are those of `collectives.torch`. Optax is optional, and needed only for its own optimizers.
"""

from collectives.frontends import basics
from collectives.frontends.basics import *  # noqa: F403
from collectives.jax import elastic, operations
from collectives.jax.eager import init, shutdown
from collectives.jax.gradients import grad, value_and_grad
from collectives.jax.operations import *  # noqa: F403
from collectives.jax.optimizer import DistributedOptimizer, distributed_gradients
from collectives.jax.state import allgather_object, broadcast_object, broadcast_parameters

__all__ = [
    "DistributedOptimizer",
    "allgather_object",
    "broadcast_object",
    "broadcast_parameters",
    "distributed_gradients",
    "elastic",
    "grad",
    "init",
    "shutdown",
    "value_and_grad",
]
__all__ += operations.__all__
__all__ += basics.__all__
