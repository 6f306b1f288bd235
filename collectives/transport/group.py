"""A group: some ranks, the transports between them, and their control plane. Made by `threads` and `mpi`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.base.config import Config
from collectives.transport.base import Control, MemoryTransport, MessageTransport
from collectives.transport.point_to_point import Endpoint


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
    """Reaches every rank; None for a single rank, or without a message transport."""
    split: Callable[[Sequence[int]], Group | None]
    """Make a group of some of these ranks, in ascending order. Called by every rank of this group; None on ranks that
    are not members."""
    ranks: tuple[int, ...]
    """The ranks' numbers in the outermost group, used in messages."""
    close: Callable[[], None]
    """Release resources owned by this group."""
    config: Config | None = None
    """The settings, with rank 0's where those hold for all ranks; None: as given."""
    open_endpoint: Callable[[], Endpoint] | None = None
    """Make this rank's end of the point-to-point messages, once. Does not wait. None without other ranks."""
    key: bytes | None = None
    """With which the ranks sign what a receiver unpickles, where that travels over connections of TCP; None elsewhere.
    """

    @property
    def local(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return next(host for host in self.hosts if self.rank in host)
