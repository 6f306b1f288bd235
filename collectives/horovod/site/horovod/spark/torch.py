"""``horovod.spark.torch``: the estimator of `collectives.spark`."""

from collectives.spark.torch import TorchEstimator as TorchEstimator
from collectives.spark.torch import TorchModel as TorchModel
