"""Process sets: subsets of the ranks that communicate among themselves.

Each has a world of its own, with its own negotiation rounds, memory and order of operations, so that disjoint and
overlapping sets work at the same time.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from collectives.base.errors import InvalidArgumentError, InvalidTypeError, NotInitializedError

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives.worlds.world import World


class ProcessSet:
    """Some of the ranks; usable after `collectives.add_process_set`.

    Args:
        ranks_or_comm: ranks of the whole world, or an mpi4py communicator, which only `init` accepts; None: all ranks.

    Attributes:
        process_set_id: 0 for all ranks, then the lowest free of 1, 2, ... as the sets are added; None before.
        mpi_comm: the communicator that the set was made of; for all ranks, the one passed to `init`.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm | None) -> None:
        mpi = sys.modules.get("mpi4py.MPI")
        self.mpi_comm: MPI.Comm | None = (
            ranks_or_comm if mpi is not None and isinstance(ranks_or_comm, mpi.Comm) else None
        )
        self._ranks: tuple[int, ...] | None = None
        try:
            if ranks_or_comm is not None and self.mpi_comm is None:
                self._ranks = tuple(sorted(int(rank.__index__()) for rank in ranks_or_comm))  # type: ignore[union-attr]
        except (TypeError, AttributeError):
            raise InvalidTypeError(
                f"ranks: expected a sequence of ranks or an mpi4py communicator, got {ranks_or_comm!r} [W51]"
            ) from None
        self.process_set_id: int | None = None
        self._root: World | None = None
        self._world: World | None = None

    @property
    def ranks(self) -> list[int] | None:
        """The ranks, ascending; before `init`, None for all ranks and for a communicator."""
        if self._ranks is None:
            return None if self._root is None else list(range(self._root.size))
        return list(self._ranks)

    def size(self) -> int:
        """The number of ranks in the set."""
        self._check()
        return len(self.ranks or ())

    def rank(self) -> int:
        """This rank's number within the set.

        Raises:
            InvalidArgumentError: this rank is not in the set.
        """
        return self.world().rank

    def included(self) -> bool:
        """Whether this rank is in the set."""
        self._check()
        return self._world is not None

    def world(self) -> World:
        """The world of the set's ranks.

        Raises:
            NotInitializedError: the set was not added, or was removed.
            InvalidArgumentError: this rank is not in the set.
        """
        if self._world is None:
            self._check()
            assert self._root is not None
            raise InvalidArgumentError(
                f"process_set: rank {self._root.rank} is not in {self}; only its ranks may call operations on it "
                f"(see included()) [W52]"
            )
        return self._world

    def number_of(self, rank: object, argument: str = "root_rank") -> object:
        """Convert a rank of the whole world to a rank of the set. Objects that are not ranks are returned as they are.

        Raises:
            InvalidArgumentError: the rank is not in the set.
        """
        self.world()
        if self._ranks is None or isinstance(rank, bool) or not hasattr(rank, "__index__"):
            return rank
        number = operator.index(rank)  # which torch 2.4 compiles, unlike __index__
        if number not in self._ranks:
            raise InvalidArgumentError(
                f"{argument}: expected a rank of {self}, got {number}; pass a rank of the whole world [A20]"
            )
        return self._ranks.index(number)

    def attach(self, number: int, root: World, world: World | None, ranks: Iterable[int] | None = None) -> None:
        """Make the set usable, as set ``number`` of ``root``; ``ranks``: those of its communicator."""
        self.process_set_id, self._root, self._world = number, root, world
        if ranks is not None:
            self._ranks = tuple(ranks)

    def attach_like(self, other: ProcessSet) -> None:
        """Make the set usable as another object for a known one."""
        assert other.process_set_id is not None and other._root is not None
        self.attach(other.process_set_id, other._root, other._world, other._ranks)

    def detach(self) -> World | None:
        """Make the set unusable. Returns its world, on its members."""
        world, self._world, self._root, self.process_set_id = self._world, None, None, None
        return world

    def _check(self) -> None:
        if self._root is None:
            raise NotInitializedError(f"{self}: call init() and add_process_set() on every rank first [W3]")

    def __deepcopy__(self, memo: object) -> ProcessSet:
        """The set itself: a copy of a module or an optimizer communicates with the same ranks."""
        return self

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"
