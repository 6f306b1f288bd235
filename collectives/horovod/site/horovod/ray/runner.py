"""``horovod.ray.runner`` is `collectives.ray`."""

from collectives.ray import RayExecutor as RayExecutor
