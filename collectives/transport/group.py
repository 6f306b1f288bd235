"""A group: some ranks, how they reach each other, and how they agree. What `threads` and `mpi` build and a World
uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.base.config import Config
from collectives.transport.base import Control, MemoryTransport, MessageTransport


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks 0 to ``size`` - 1 as one of them sees them."""

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    """The ranks of each host, each host in rank order, hosts in the order of their first ranks."""
    control: Control
    memory: MemoryTransport | None
    """Reaches the ranks of this host; None where memory cannot be shared."""
    messages: MessageTransport | None
    """Reaches every rank; None where there is nobody to send to, or nothing to send with."""
    split: Callable[[Sequence[int]], Group | None]
    """Makes a group of some of these ranks, in ascending order; called by every rank of this group, None on those left
    out."""
    ranks: tuple[int, ...]
    """The ranks' numbers in the outermost group, by which messages call them."""
    close: Callable[[], None]
    """Gives back what was made for the group, and nothing else."""
    config: Config | None = None
    """The settings with rank 0's where those hold for all; None: as they were given."""

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)
