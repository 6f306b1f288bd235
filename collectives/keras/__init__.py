"""Keras 3: ``import collectives.keras as hvd``, with the names, arguments and habits of Horovod's Keras interface.

    import collectives.keras as hvd

    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])

It supports Keras's TensorFlow, JAX and PyTorch backends, and imports no framework but the backend's.
"""

from collectives import allgather_object, barrier, broadcast_object, init, join, shutdown
from collectives.frontends import basics
from collectives.frontends.basics import *  # noqa: F403
from collectives.keras import callbacks
from collectives.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from collectives.keras.saving import load_model
from collectives.keras.value_collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "init",
    "join",
    "load_model",
    "reducescatter",
    "shutdown",
]
__all__ += basics.__all__
