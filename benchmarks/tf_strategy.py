"""TensorFlow's MultiWorkerMirroredStrategy as a contestant: one worker per rank, rings over gRPC."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

from collectives.tools.bench.ranks import Ranks

HOST = "127.0.0.1"


@contextlib.contextmanager
def strategy(ranks: Ranks) -> Iterator[Any]:
    """A strategy over all ranks of this host: call it before TensorFlow has done anything else."""
    import tensorflow as tf

    if ranks.local_size != ranks.size:
        raise ValueError(
            f"MultiWorkerMirroredStrategy: expected all {ranks.size} ranks on one host, found {ranks.local_size} on "
            f"this one"
        )
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        ports = ranks.gather(port)
    cluster = {
        "cluster": {"worker": [f"{HOST}:{port}" for port in ports]},
        "task": {"type": "worker", "index": ranks.rank},
    }
    os.environ["TF_CONFIG"] = json.dumps(cluster)
    try:
        yield tf.distribute.MultiWorkerMirroredStrategy(communication_options=options())
    finally:
        del os.environ["TF_CONFIG"]


def options() -> Any:
    """Rings over gRPC."""
    import tensorflow as tf

    experimental = tf.distribute.experimental
    return experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation.RING)


def sum_of(strategy: Any, tensors: Sequence[Any]) -> Any:
    """All tensors, summed over the workers, as one of the strategy's fused calls; inside ``tf.function``."""
    import tensorflow as tf

    def reduce() -> Any:
        return tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.SUM, list(tensors), options=options()
        )

    return strategy.run(reduce)
