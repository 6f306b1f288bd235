"""`collectives.torch.elastic` under Horovod's name."""

from collectives.torch.elastic import ElasticSampler, TorchState, run
from horovod.torch.elastic import sampler, state  # type: ignore[import-not-found]

__all__ = ["ElasticSampler", "TorchState", "run", "sampler", "state"]
