"""``horovod.spark.runner`` is `collectives.spark`."""

from collectives.spark import run as run
from collectives.spark import run_elastic as run_elastic
