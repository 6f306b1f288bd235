"""Not here; see the error."""

from collectives.horovod import absent

raise absent(__name__, "there is no adapter for Keras; collectives.allreduce and the others take its tensors as they are")
