"""The process sets that `init` is given: the ranks of each, and the list that all ranks agree on.

A communicator has different members on different ranks, as after a split. An element of the list therefore stands for
all its different sets, in the order of the ranks, and every rank makes them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from collectives.base.errors import InvalidArgumentError, MismatchError
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

Ranks = tuple[int, ...]


def ranks_of(members: ProcessSet, comm: MPI.Intracomm | Sequence[int] | None) -> Ranks:
    """The ranks of a set in the world that `init` makes of ``comm``.

    Raises:
        InvalidArgumentError: its communicator has ranks that are not in that world.
    """
    if members.mpi_comm is None:
        return tuple(members.ranks or ())
    from mpi4py import MPI

    all_ranks: Any = comm.Get_group() if isinstance(comm, MPI.Comm) else MPI.COMM_WORLD.Get_group()
    if comm is not None and not isinstance(comm, MPI.Comm):
        all_ranks = all_ranks.Incl(list(comm))
    group = members.mpi_comm.Get_group()
    translated = group.Translate_ranks(list(range(group.Get_size())), all_ranks)
    if MPI.UNDEFINED in translated:
        raise InvalidArgumentError(
            f"process_sets: the communicator {members.mpi_comm!r} has ranks that do not take part in this init()"
        )
    return tuple(sorted(translated))


def agreed(root: World, own_sets: Sequence[tuple[Ranks, bool]]) -> list[Ranks]:
    """The sets that all ranks make, in order, without duplicates.

    Args:
        root: of all ranks.
        own_sets: the ranks of each element of this rank's list, and whether it is a communicator.

    Raises:
        MismatchError: the lists differ in length, or in the ranks of an element that is not a communicator.
    """
    everyone = root.allgather_object(list(own_sets), name="init.process_sets")
    agreed_sets: dict[Ranks, None] = {}
    for place in range(max(map(len, everyone))):
        at_place = [listed[place] if place < len(listed) else None for listed in everyone]
        if len(set(at_place)) > 1 and not all(each is not None and each[1] for each in at_place):
            answers = "; ".join(
                f"rank {root.ranks[rank]}: {'none' if each is None else list(each[0])}"
                for rank, each in enumerate(at_place)
            )
            raise MismatchError(
                f"rank {root.ranks[root.rank]}: init: process_sets[{place}] is not the same on every rank: {answers}; "
                f"every rank must give the same ranks, or communicators"
            )
        agreed_sets |= dict.fromkeys(each[0] for each in at_place if each is not None)
    return list(agreed_sets)
