"""The hook that broadcasts variables when a session begins."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.tensorflow.functions import broadcast_variables
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.runtime import global_process_set


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts the root's global variables, by one call, after a session was created.

    For a ``tf.compat.v1.train.MonitoredTrainingSession`` of a TensorFlow 1 graph, whether its variables are initialized
    or restored from a checkpoint; also after a lost session is created again.

    Args:
        root_rank: the root, as a rank of the world.
        device: the device of the operations.
        process_set: the ranks that train together; the hook does nothing on others.

    Raises (after the session was created):
        tf.errors.OpError: there is no rank ``root_rank``, or the ranks' variables differ; on every rank, with our
            message.
    """

    def __init__(self, root_rank: int, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device
        self.process_set = process_set

    def begin(self) -> None:
        """Add the operation to the graph, which is complete."""
        graph = tf.compat.v1.get_default_graph()
        if self.process_set.included() and (self.bcast_op is None or self.bcast_op.graph is not graph):
            with tf.device(self.device):
                self.bcast_op = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank, self.process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the operation."""
        if self.bcast_op is not None:
            session.run(self.bcast_op)
