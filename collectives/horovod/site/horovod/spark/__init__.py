"""``horovod.spark`` is `collectives.spark`."""

from collectives.base.errors import MissingDependencyError
from collectives.horovod.unavailable import INSTEAD

try:
    from collectives.spark import run as run
    from collectives.spark import run_elastic as run_elastic
except MissingDependencyError as error:  # a module of this package is then not even looked for
    raise MissingDependencyError(
        f"{error}. Not in collectives: horovod.spark.lightning ({INSTEAD['horovod.spark.lightning']}) [F117]"
    ) from None
