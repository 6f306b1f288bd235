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
from collectives.keras import callbacks, elastic, value_collectives
from collectives.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from collectives.keras.value_collectives import *  # noqa: F403

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "callbacks",
    "elastic",
    "init",
    "join",
    "load_model",
    "shutdown",
]
__all__ += value_collectives.__all__
__all__ += basics.__all__
