"""``horovod.ray`` is `collectives.ray`."""

from collectives.ray import ElasticRayExecutor as ElasticRayExecutor
from collectives.ray import RayExecutor as RayExecutor
