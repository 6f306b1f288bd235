"""The state of `collectives.torch.elastic`, and its handlers."""

from collectives.torch.elastic import *  # noqa: F403
