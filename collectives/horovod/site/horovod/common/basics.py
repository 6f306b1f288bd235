"""``HorovodBasics``: ranks, sizes and questions about the build as methods, for adapters of one's own."""

from __future__ import annotations

from typing import Any

import collectives.horovod
from collectives.base.errors import InvalidArgumentError
from collectives.worlds import runtime


class HorovodBasics:
    """The names of `collectives.horovod` as attributes: ``init``, ``rank``, ``mpi_built`` and so on.

    The arguments are the location of Horovod's compiled library, which there is none of.
    """

    def __init__(self, pkg_path: str, *args: str) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(collectives.horovod, name)

    def _get_process_set_ids_and_ranks(self) -> dict[int, list[int]]:
        """Return the ranks of every process set by its number."""
        runtime.world()
        return {number: list(members.ranks or ()) for number, members in runtime.default.known}

    def _process_set_rank(self, process_set_id: int) -> int:
        """Return this rank's number in a process set."""
        return runtime.process_set_of(process_set_id).rank()

    def _process_set_size(self, process_set_id: int) -> int:
        """Return the number of ranks in a process set."""
        return runtime.process_set_of(process_set_id).size()

    def _comm_process_set_id(self, comm: Any) -> int:
        """Return the number of the process set with the ranks of a communicator; InvalidArgumentError without one."""
        from mpi4py import MPI

        group, whole = comm.Get_group(), MPI.COMM_WORLD.Get_group()
        ranks = sorted(group.Translate_ranks(list(range(group.Get_size())), whole))
        ranks_by_number = self._get_process_set_ids_and_ranks()
        for number, members in ranks_by_number.items():
            if members == ranks:
                return number
        raise InvalidArgumentError(
            f"process_set: no process set has the ranks {ranks} of the communicator; expected one of "
            f"{ranks_by_number} [W44]"
        )
