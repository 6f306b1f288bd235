"""The sampler of `collectives.torch.elastic`."""

from collectives.torch.elastic import *  # noqa: F403
