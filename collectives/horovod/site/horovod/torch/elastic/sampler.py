"""The sampler of `collectives.torch.elastic`."""

from collectives.torch.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
