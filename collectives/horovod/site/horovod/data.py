"""Not here; see the error."""

from collectives.horovod import absent

raise absent(__name__, "there are no data loaders; use the framework's, with the rank and the size for its sampler")
