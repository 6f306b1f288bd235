"""Not here; see the error."""

from collectives.horovod import absent

raise absent(__name__, "there is nothing for Ray; start the ranks with collectivesrun, or from a program with collectives.launch.run")
