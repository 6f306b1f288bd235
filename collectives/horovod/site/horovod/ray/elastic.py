"""``horovod.ray.elastic`` is `collectives.ray`."""

from collectives.ray import ElasticRayExecutor as ElasticRayExecutor
