"""``tf.keras``: ``import collectives.tensorflow.keras as hvd``, with the names, arguments and conventions of Horovod's
interface.

Where ``tf.keras`` is Keras 3, the names are those of `collectives.keras`; with ``TF_USE_LEGACY_KERAS=1`` in the
environment ``tf.keras`` is Keras 2 (the package ``tf_keras``), and the names are for that.
"""

import tensorflow as tf

from collectives import allgather_object, barrier, broadcast_object, init, join, shutdown
from collectives.frontends import basics
from collectives.frontends.basics import *  # noqa: F403
from collectives.tensorflow.functions import broadcast_variables
from collectives.tensorflow.keras import callbacks, elastic
from collectives.tensorflow.keras_version import LEGACY

if not LEGACY and tf.keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"collectives.tensorflow.keras: expected Keras with the backend tensorflow, got {tf.keras.backend.backend()}; "
        "import collectives.keras as hvd, or set KERAS_BACKEND=tensorflow [F8]"
    )
if LEGACY:
    from collectives.tensorflow.keras.legacy import DistributedOptimizer, PartialDistributedOptimizer, load_model
    from collectives.tensorflow.keras.legacy_values import (
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        reducescatter,
    )
else:
    from collectives.keras import (
        DistributedOptimizer,
        PartialDistributedOptimizer,
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        load_model,
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
    "elastic",
    "init",
    "join",
    "load_model",
    "reducescatter",
    "shutdown",
]
__all__ += basics.__all__
