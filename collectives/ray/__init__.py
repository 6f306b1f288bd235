"""Ranks on Ray: actors that stay, and elastic jobs on a cluster that grows and shrinks. Horovod's names; docs/ray.md.

Example:
    import ray
    from collectives.ray import RayExecutor

    ray.init()
    executor = RayExecutor(num_workers=4)
    executor.start()
    losses = executor.run(train, args=["/data"])
    executor.shutdown()
"""

from collectives.base.errors import MissingDependencyError

try:
    import ray as _ray  # noqa: F401
except ImportError:
    raise MissingDependencyError("collectives.ray needs Ray: pip install ray [L90]") from None

from collectives.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
from collectives.ray.executor import RayExecutor as RayExecutor
from collectives.ray.worker import log as log

__all__ = ["ElasticRayExecutor", "RayExecutor", "log"]
