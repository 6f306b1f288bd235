"""How many files the launcher may have open: each host takes some, and often no more than 1,024 are allowed."""

from __future__ import annotations

import resource
from contextlib import suppress

from collectives.base.errors import InvalidArgumentError

_OF_HOST, _OF_RANK, _OWN = 3, 1, 100
"""The launcher's open files: for each host (its agent's streams), for each rank (a connection to the store), others."""


class OpenFiles:
    """The limit of this process."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def allow(self, hosts: int, ranks: int) -> None:
        """Raise the limit to what a job needs. InvalidArgumentError: the system does not allow so many."""
        needed = hosts * _OF_HOST + ranks * _OF_RANK + _OWN
        soft, hard = (
            limit if limit != resource.RLIM_INFINITY else needed for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
        )
        if needed > hard:
            raise InvalidArgumentError(
                f"the launcher needs {needed} open files for {hosts} hosts and {ranks} ranks, but this system allows "
                f"{hard}; raise the hard limit (ulimit -Hn), or use fewer hosts [L132]"
            )
        if needed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, self._before[1]))

    def restore(self) -> None:
        """In a child: the limit as it was, since programs that call ``select`` fail with more than 1,024 open files."""
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
