"""``horovod.ray.ray_logger``: what rank 0 logs is heard by an executor's callbacks."""

from collectives.ray import log as log
