"""`collectives.torch.elastic` under Horovod's name."""

from collectives.torch.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
