"""Ranks on Spark: tasks of a barrier stage, elastic jobs, and estimators. Horovod's names; see docs/spark.md.

Example:
    from pyspark.sql import SparkSession
    import collectives.spark

    SparkSession.builder.getOrCreate()
    losses = collectives.spark.run(train, args=("/data",), num_proc=4)
"""

import importlib
from typing import TYPE_CHECKING, Any

from collectives.base.errors import MissingDependencyError

try:
    import pyspark as _pyspark  # noqa: F401
except ImportError:
    raise MissingDependencyError("collectives.spark needs Spark: pip install pyspark [L107]") from None

from collectives.spark.elastic import run_elastic as run_elastic
from collectives.spark.runner import run as run

if TYPE_CHECKING:
    from collectives.spark.keras import KerasEstimator as KerasEstimator
    from collectives.spark.store import LocalStore as LocalStore
    from collectives.spark.store import Store as Store
    from collectives.spark.torch import TorchEstimator as TorchEstimator

_LATE = {"KerasEstimator": "keras", "LocalStore": "store", "Store": "store", "TorchEstimator": "torch"}
"""Names whose modules need more than Spark."""

__all__ = ["KerasEstimator", "LocalStore", "Store", "TorchEstimator", "run", "run_elastic"]


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"collectives.spark.{_LATE[name]}"), name)
