"""The hook that gives all ranks the same variables when a session begins."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.process_sets import ProcessSet
from collectives.runtime import global_process_set
from collectives.tensorflow.functions import broadcast_variables


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Gives the global variables of all ranks the root's values, in one call, after a session was created.

    For a ``tf.compat.v1.train.MonitoredTrainingSession`` of a graph in the style of TensorFlow 1, whether its variables
    were initialised or come from a checkpoint; again when the session was lost and is made anew.

    Args:
        root_rank: the rank whose values count.
        device: where the operations are placed.
        process_set: the ranks that train together; on others the hook does nothing.

    Raises (when the session has been created):
        tf.errors.OpError: ``root_rank`` is none of the ranks, or the ranks' variables differ; on every rank, with our
        message.
    """

    def __init__(self, root_rank: int, device: str = "", *, process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: Any = None
        self.device = device
        self.process_set = process_set

    def begin(self) -> None:
        """Add the operation to the graph, which has all its variables now."""
        graph = tf.compat.v1.get_default_graph()
        if self.process_set.included() and (self.bcast_op is None or self.bcast_op.graph is not graph):
            with tf.device(self.device):
                self.bcast_op = broadcast_variables(tf.compat.v1.global_variables(), self.root_rank, self.process_set)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it.

        Raises:
            MismatchError, RankFailedError, CollectiveTimeoutError: as for `collectives.broadcast`, within TensorFlow's
                error.
        """
        if self.bcast_op is not None:
            session.run(self.bcast_op)
