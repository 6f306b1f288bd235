"""``horovod.spark.keras``: the estimator of `collectives.spark`."""

from collectives.spark.keras import KerasEstimator as KerasEstimator
from collectives.spark.keras import KerasModel as KerasModel
