"""Elastic training with TensorFlow: ``hvd.elastic``; see `collectives.elastic`.

Example:
    import collectives.tensorflow as hvd

    hvd.init()
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        for state.batch in range(state.batch, 1000):
            training_step()         # with a DistributedGradientTape, in a tf.function or not
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from collectives.elastic import HostsUpdatedInterrupt, ObjectState, run
from collectives.elastic.model_state import ModelState, Variables, VariablesPart
from collectives.elastic.shadow import Part

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(ObjectState):
    """A state of variables and plain attributes, in eager execution, or in a graph with its session.

    Args:
        variables: ``tf.Variable`` s, as many and in the same order on every rank; by default the graph's global ones.
        session: in a graph, that reads and writes them; by default the default one.

    Example:
        state = hvd.elastic.TensorFlowState([weights, biases], batch=0)
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = None if tf.executing_eagerly() else session or tf.compat.v1.get_default_session()
        super().__init__(**kwargs)

    def _parts(self) -> Mapping[str, Part]:
        if self.session is None:
            return {"variables": VariablesPart(lambda: self.variables)}
        return {"variables": VariablesPart(lambda: self.variables, self.session.run, self._load)}

    def _load(self, variables: Variables, values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.load(value, self.session)


class TensorFlowKerasState(ModelState):
    """A state of a ``tf.keras`` model, its optimizer and plain attributes; see `collectives.keras.elastic.KerasState`.

    Args:
        model: a built model.
        optimizer: by default the one that the model was compiled with, if any.
        backend: ``tf.keras.backend`` of Keras 2, whose session reads and writes the variables in a graph.

    Raises:
        InvalidArgumentError (a ValueError): the model is not built.

    Example:
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        self.backend = backend
        if backend is None or tf.executing_eagerly():
            super().__init__(model, optimizer, **kwargs)
        else:
            super().__init__(model, optimizer, read=backend.batch_get_value, write=self._write, **kwargs)

    def _write(self, variables: Variables, values: Sequence[Any]) -> None:
        self.backend.batch_set_value(list(zip(variables, values, strict=True)))
