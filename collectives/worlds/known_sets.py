"""The process sets of a world, by number, and those that `init` is given.

A communicator has different members on different ranks, as after a split. An element of the list that `init` is given
therefore stands for all its different sets, in the order of the ranks, and every rank makes them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, MismatchError
from collectives.worlds.process_sets import ProcessSet
from collectives.worlds.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

Ranks = tuple[int, ...]


class KnownSets:
    """The process sets that every rank of a world has made, in the same order. The numbers of removed ones are assigned
    again, in the order of their removal; that of ``everyone`` is 0, and stays.
    """

    def __init__(self, everyone: ProcessSet) -> None:
        self._everyone = everyone
        self._sets: dict[int, ProcessSet] = {0: everyone}
        self._also: list[ProcessSet] = []
        """Further objects for sets that are in ``_sets``."""
        self._free_numbers: deque[int] = deque()

    def __iter__(self) -> Iterator[tuple[int, ProcessSet]]:
        """Each number and its set, in the order of the numbers."""
        return iter(sorted(self._sets.items()))

    def of(self, number: int) -> ProcessSet:
        """The set of a number, whether this rank is in it or not.

        Raises:
            InvalidArgumentError: there is none.
        """
        if number not in self._sets:
            raise InvalidArgumentError(
                f"process_set: there is no process set {number}; expected one of {sorted(self._sets)} [W45]"
            )
        return self._sets[number]

    def add(self, members: ProcessSet, root: World, unlike: bool) -> None:
        """Make a set and number it; see `collectives.add_process_set`, also for what it raises."""
        try:
            if members.process_set_id is not None:
                raise InvalidArgumentError(f"{members} is already added; use it without adding it again [W46]")
            if members.ranks is None and members.mpi_comm is not None:
                raise NotImplementedError(
                    f"{members}: add_process_set() cannot use a communicator; pass the set to init(process_sets=...), "
                    "or name its ranks [W47]"
                )
            ranks = members.ranks if members.ranks is not None else list(range(root.size))
            number = self._number_of(ranks) if unlike else None
            if number is not None:
                raise InvalidArgumentError(f"{members} is a duplicate: process set {number} has the same ranks [W48]")
        except (InvalidTypeError, InvalidArgumentError, NotImplementedError) as error:
            raise root.refused(error, None) from None
        self._make(members, root, ranks)

    def foresee(self, process_sets: Sequence[ProcessSet], root: World) -> None:
        """Number sets in ``root``, the world of a process that is not admitted to an elastic job yet, as of this
        process alone; `remake` makes them those of the other ranks."""
        for number, members in enumerate(process_sets, max(self._sets) + 1):
            members.attach(number, root, root)
            self._sets[number] = members

    def add_first(self, process_sets: Sequence[ProcessSet], root: World, comm: Any) -> None:
        """Make the sets that `init` was given, with the communicator or ranks ``comm`` that it was given.

        Raises:
            InvalidArgumentError, MismatchError: see `_ranks_of`, `_agreed` and `recognize`.
        """
        own_sets = []
        try:
            own_sets = [(_ranks_of(members, comm), members.mpi_comm is not None) for members in process_sets]
        except InvalidArgumentError as error:
            raise root.refused(error, "init.process_sets.length") from None
        for ranks in _agreed(root, own_sets):
            if self._number_of(ranks) is None:
                self._make(ProcessSet(ranks), root, ranks)
        self.recognize(process_sets, root, comm)

    def recognize(self, process_sets: Sequence[ProcessSet], root: World, comm: Any) -> None:
        """Attach the given objects to the known sets of the same ranks.

        Raises:
            InvalidArgumentError: there is no such set, or another object has it already, or it is of all ranks.
        """
        seen: set[int | None] = {0}
        refused = []
        for place, members in enumerate(process_sets):
            ranks = _ranks_of(members, comm)
            number = self._number_of(ranks)
            if number is None:
                refused.append(
                    f"process_sets[{place}]: no set of the ranks {list(ranks)} exists; call add_process_set() for it"
                )
            elif number in seen:
                members.detach()
                refused.append(f"process_sets[{place}] is a duplicate: set {number} has the same ranks {list(ranks)}")
            elif self._sets[number] is not members:
                members.attach_like(self._sets[number])
                self._also.append(members)
            seen.add(number)
        if refused:
            raise InvalidArgumentError(f"rank {root.rank}: init: {'; '.join(refused)} [W49]")

    def remove(self, members: ProcessSet, root: World) -> bool:
        """Shut a set down, and free its number; see `collectives.remove_process_set`, also for what it raises."""
        number = members.process_set_id
        if not number or not any(registered is members for registered in (*self._sets.values(), *self._also)):
            return False
        child = members.world() if members.included() else None
        root.remove_process_set(members.ranks or [], child)
        self._sets.pop(number).detach()
        for registered in [registered for registered in self._also if registered.process_set_id == number]:
            self._also.remove(registered)
            registered.detach()
        self._free_numbers.append(number)
        members.detach()
        return True

    def by_members(self, members: Sequence[int]) -> list[tuple[int, list[int]]]:
        """The sets but the one of all ranks: their numbers, and what stands in ``members`` for each of their ranks."""
        return [(number, [members[rank] for rank in known.ranks or ()]) for number, known in self if number]

    def remake(self, sets: Sequence[tuple[int, Sequence[int]]], root: World) -> None:
        """Make the sets of an earlier world again in ``root``, by these numbers, of these ranks; every rank calls it.
        Sets that are not among them become unusable. After an error it may be called again, with another world."""
        remade = {0: self._everyone}
        for number, ranks in sets:
            remade[number] = self._sets.get(number) or ProcessSet(ranks)
            remade[number].attach(number, root, root.add_process_set(ranks), ranks)
        for number, known in self._sets.items():
            if number not in remade:
                known.detach()
        self._sets, also, self._also = remade, self._also, []
        for known in also:
            like = remade.get(known.process_set_id or 0)
            known.detach()
            if like is not None:
                known.attach_like(like)
                self._also.append(known)
        self._free_numbers = deque(number for number in range(1, max(remade)) if number not in remade)

    def forget(self) -> None:
        """Detach all sets from their world, which has ended."""
        for registered in (*self._sets.values(), *self._also):
            registered.detach()
        self._sets = {0: self._everyone}
        self._also.clear()
        self._free_numbers.clear()

    def _number_of(self, ranks: Sequence[int]) -> int | None:
        """The number of the set that has these ranks; None if there is none."""
        return next((number for number, registered in self if tuple(registered.ranks or ()) == tuple(ranks)), None)

    def _make(self, members: ProcessSet, root: World, ranks: Sequence[int]) -> None:
        child = root.add_process_set(ranks)
        number = self._free_numbers.popleft() if self._free_numbers else max(self._sets) + 1
        members.attach(number, root, child)
        self._sets[number] = members


def _ranks_of(members: ProcessSet, comm: MPI.Intracomm | Sequence[int] | None) -> Ranks:
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
            f"process_sets: the communicator {members.mpi_comm!r} has ranks that do not take part in this init() [W50]"
        )
    return tuple(sorted(translated))


def _agreed(root: World, own_sets: Sequence[tuple[Ranks, bool]]) -> list[Ranks]:
    """The sets that all ranks make, in order, without duplicates; ``own_sets`` are the ranks of each element of this
    rank's list, and whether it is a communicator.

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
                f"rank {root.ranks[root.rank]}: init: the ranks disagree on process_sets[{place}]: {answers}; "
                "pass the same ranks, or communicators, on every rank [M20]"
            )
        agreed_sets |= dict.fromkeys(each[0] for each in at_place if each is not None)
    return list(agreed_sets)
