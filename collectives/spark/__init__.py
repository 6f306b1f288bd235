"""Ranks on Spark: tasks of a barrier stage, elastic jobs, and estimators. Horovod's names; see docs/spark.md.

from pyspark.sql import SparkSession
import collectives.spark

SparkSession.builder.getOrCreate()
losses = collectives.spark.run(train, args=("/data",), num_proc=4)
"""

from collectives.base.errors import MissingDependencyError

try:
    import pyspark as _pyspark  # noqa: F401
except ImportError:
    raise MissingDependencyError("collectives.spark needs Spark: pip install pyspark") from None

from collectives.spark.elastic import run_elastic as run_elastic
from collectives.spark.runner import run as run

__all__ = ["run", "run_elastic"]
