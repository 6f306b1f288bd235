"""`collectives.tensorflow.elastic` under Horovod's name."""

from collectives.tensorflow.elastic import TensorFlowKerasState, TensorFlowState, run

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]
