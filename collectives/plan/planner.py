"""The planner: which algorithm, through which medium, in blocks of what size.

The choice depends on what all ranks know alike (the collective, the bytes, where the ranks are, what their hosts
allow), so that every rank comes to the same one without asking. The crossovers were measured with ``benchmarks`` (see
``docs/architecture.md``) and are kept in one table; any of them can be overruled by an argument or the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from collectives import ring
from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.plan.lowering import Medium
from collectives.schedules import direct, hierarchical, tree
from collectives.schedules.schedule import Schedule
from collectives.transport.base import SLOT_BYTES

KIB, MIB = 1 << 10, 1 << 20

_SCRATCH_LIMIT = 24 * MIB


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks are and how those on one host reach each other."""

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    shares_memory: bool
    reads_private: bool

    @property
    def one_host(self) -> bool:
        return len(self.hosts) == 1


@dataclass(frozen=True, slots=True)
class Choice:
    """What the planner decided for one call."""

    algorithm: str
    medium: Medium
    """How ranks on one host exchange blocks; ranks on different hosts pass messages."""
    block_bytes: int
    """What one segment takes from each chunk."""
    overlap: bool
    """Whether the rounds of different segments overlap."""
    why: str = field(default="", compare=False)
    """What decided on the algorithm and on the medium."""

    @property
    def staged(self) -> bool:
        return self.medium is Medium.WINDOW

    @property
    def versioned(self) -> bool:
        """One-shot and recursive doubling write a chunk while a peer may still read it."""
        return self.algorithm in ("one-shot", "recursive-doubling")


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Bytes up to which each choice holds. All-reduce: bytes of the tensor; the others: bytes of all chunks
    together."""

    one_shot: int = 32 * KIB
    """All-reduce in one round: every rank reads everything from everybody."""
    one_shot_pair: int = MIB
    """The same with two ranks, where it moves no more than the two rounds of `direct` do."""
    window: int = MIB
    """Through windows; beyond, the peers' private memory is read, if it can be."""
    window_moves: int = 512 * KIB
    """The same for collectives that only move data, where a direct read saves a copy."""
    flat_broadcast: int = 128 * KIB
    """Everyone reads everything from the root; beyond, the ranks share the work."""
    native: int = 2 * KIB
    """MPI's own all-reduce, where messages are all there is."""
    doubling: int = 32 * KIB
    """Recursive doubling over messages."""


_ALGORITHMS: dict[str, dict[str, Callable[..., Schedule]]] = {
    "allreduce": {
        "ring": ring.allreduce,
        "direct": direct.allreduce,
        "one-shot": direct.one_shot,
        "recursive-doubling": tree.recursive_doubling,
        "hierarchical": hierarchical.allreduce,
    },
    "reducescatter": {"ring": ring.reducescatter, "direct": direct.reducescatter},
    "allgather": {"ring": ring.allgather, "direct": direct.allgather},
    "broadcast": {
        "ring": ring.broadcast,
        "direct": direct.broadcast,
        "one-shot": direct.broadcast_flat,
        "recursive-doubling": tree.broadcast,
    },
    "alltoall": {"direct": direct.alltoall},
}


def algorithms(collective: str) -> tuple[str, ...]:
    """The names of the algorithms that a collective has."""
    native = ("native",) if collective == "allreduce" else ()
    return (*_ALGORITHMS[collective], *native)


def schedules(collective: str, algorithm: str, placement: Placement, root: int = 0) -> Callable[[int], Schedule]:
    """The schedule of any rank, for an algorithm of a collective."""
    build = _ALGORITHMS[collective][algorithm]
    if algorithm == "hierarchical":
        return lambda rank: build(rank, placement.hosts)
    if collective == "broadcast":
        return lambda rank: build(rank, placement.size, root)
    return lambda rank: build(rank, placement.size)


class Planner:
    """Chooses; made once for a group.

    Args:
        placement: of the ranks; the same facts on every rank.
        algorithm, transport, segment: choices made for every call by the environment ("auto", "auto", 0: none made).
    """

    def __init__(
        self,
        placement: Placement,
        *,
        algorithm: str = "auto",
        transport: str = "auto",
        segment: int = 0,
        crossovers: Crossovers | None = None,
    ) -> None:
        self.placement = placement
        self.crossovers = crossovers or Crossovers()
        self.epoch = 0
        """Changes when choices may differ from earlier ones, so that plans are made anew."""
        self._algorithm = algorithm
        self._transport = transport
        self._segment = segment

    def choose(
        self,
        collective: str,
        nbytes: int,
        *,
        native: bool = False,
        ordered: bool = False,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Choice:
        """Decide for one call.

        Args:
            collective: its name.
            nbytes: bytes of all chunks together; of the largest sum over ranks where they differ.
            native: whether MPI knows the dtype and the operation.
            ordered: a op b is not b op a to the last bit (a product of complex numbers), so that each element must be
                reduced on one rank for all ranks to get the same.
            algorithm, transport: forced for this call; None or "auto": not.

        Raises:
            InvalidArgumentError: the collective has no such algorithm, or no such transport is known.
            TransportError: it is known, but cannot serve these ranks.
        """
        forced = algorithm if algorithm not in (None, "auto") else None
        if forced is not None and forced not in algorithms(collective):
            raise InvalidArgumentError(f"algorithm={forced!r}: {collective} has {', '.join(algorithms(collective))}")
        if forced is None and self._algorithm in algorithms(collective):
            forced = self._algorithm
        medium, why_medium = self._medium(collective, nbytes, transport, forced)
        if self.placement.size == 1:  # nothing moves, so that every algorithm and every transport serves
            return Choice(forced or "direct", medium, 0, False, "one rank")
        name, why = forced or "", "algorithm as asked for"
        if forced is None:
            name, why = self._choose_algorithm(collective, nbytes, medium, native and not ordered, ordered)
        if (
            name == "one-shot"
            and collective == "allreduce"
            and not (medium is Medium.WINDOW and self.placement.one_host)
        ):
            raise TransportError(
                f"algorithm='one-shot' works in the windows of one host only, not with {medium.value} on "
                f"{len(self.placement.hosts)} hosts"
            )
        if name == "recursive-doubling" and collective == "allreduce" and medium is Medium.DIRECT:
            medium = Medium.WINDOW
        if name == "native" and not native:
            raise InvalidArgumentError(
                "algorithm='native': MPI does not reduce this dtype and operation as we do, or there is no MPI here"
            )
        block = self._block(collective, nbytes, name, medium)
        return Choice(name, medium, block, self._overlaps(name, medium), f"{why}; {why_medium}")

    def change(self, *, algorithm: str, segment: int, crossovers: Crossovers) -> None:
        """Choose differently from now on; every rank does so between the same two operations."""
        self._algorithm, self._segment, self.crossovers = algorithm, segment, crossovers
        self.epoch += 1

    def _medium(self, collective: str, nbytes: int, transport: str | None, algorithm: str | None) -> tuple[Medium, str]:
        """The medium, and why."""
        forced = transport if transport not in (None, "auto") else self._transport
        placement = self.placement
        if forced == "auto" or forced is None:
            if not placement.shares_memory:
                return Medium.MESSAGE, "the ranks of a host cannot share memory"
            versioned = algorithm in ("one-shot", "recursive-doubling") and collective == "allreduce"
            limits = self.crossovers
            limit = limits.window if collective in ("allreduce", "reducescatter") else limits.window_moves
            if nbytes <= limit:
                return Medium.WINDOW, f"window up to {limit} bytes"
            if versioned:
                return Medium.WINDOW, f"window, which {algorithm} needs"
            if not placement.reads_private:
                return Medium.WINDOW, "window, because this system lets no process read its peers' memory"
            return Medium.DIRECT, f"direct reads above {limit} bytes"
        medium = next((m for m in Medium if m.value == forced), None)
        if medium is None:
            raise InvalidArgumentError(
                f"transport={forced!r}: expected one of auto, {', '.join(m.value for m in Medium)}"
            )
        if placement.size == 1:
            return medium, "one rank"
        if medium is Medium.WINDOW and not placement.shares_memory:
            raise TransportError(
                "transport='window': the ranks of a host cannot share memory here; use 'mpi' or 'auto'"
            )
        if medium is Medium.DIRECT and not placement.reads_private:
            raise TransportError(
                "transport='direct-read': this system does not let a process read its peers' memory (containers may "
                "refuse "
                "process_vm_readv); use 'window' or 'auto'"
            )
        return medium, "medium as asked for"

    def _choose_algorithm(
        self, collective: str, nbytes: int, medium: Medium, native: bool, ordered: bool
    ) -> tuple[str, str]:
        """The algorithm, and why."""
        limits, placement = self.crossovers, self.placement
        messages = medium is Medium.MESSAGE or not placement.one_host
        if collective == "allreduce":
            if messages:
                if native and nbytes <= limits.native:
                    return "native", f"MPI's own up to {limits.native} bytes over messages"
                if nbytes <= limits.doubling and not ordered:
                    return "recursive-doubling", f"fewest messages up to {limits.doubling} bytes"
                if medium is not Medium.MESSAGE:
                    return "hierarchical", "several hosts, whose ranks share memory"
                return (
                    ("direct", "up to 4 ranks over messages")
                    if placement.size <= 4
                    else ("ring", "more than 4 ranks over messages")
                )
            pair = placement.size == 2
            small = limits.one_shot_pair if pair else limits.one_shot
            if medium is Medium.WINDOW and nbytes <= small and not ordered:
                return "one-shot", f"one round with {'2' if pair else 'more than 2'} ranks, up to {small} bytes"
            return "direct", "ranks of one host"
        if collective == "broadcast":
            if messages:
                small = limits.doubling
                return (
                    ("recursive-doubling", f"messages, up to {small} bytes")
                    if nbytes <= small
                    else ("ring", f"above {small} bytes")
                )
            small = limits.flat_broadcast
            return (
                ("one-shot", f"everyone reads all, up to {small} bytes")
                if nbytes <= small
                else ("direct", f"above {small} bytes")
            )
        if medium is Medium.MESSAGE and placement.size > 8 and collective in ("allgather", "reducescatter"):
            return "ring", "more than 8 ranks over messages"
        return "direct", "each block straight to whom it is for"

    def _block(self, collective: str, nbytes: int, algorithm: str, medium: Medium) -> int:
        """Bytes per chunk and segment: small enough for the caches, large enough for Python."""
        size = self.placement.size
        if self._segment:
            return max(64, self._segment // 64 * 64)
        if medium is Medium.DIRECT:
            if algorithm != "direct":
                return 512 * KIB
            if collective not in ("allreduce", "reducescatter"):
                return 32 * MIB
            block = MIB if nbytes <= 8 * MIB else 512 * KIB
            return (
                block if self.placement.one_host else min(block, max(4 * KIB, _SCRATCH_LIMIT // (2 * size) // 64 * 64))
            )
        if medium is Medium.WINDOW:
            chunks = (
                1
                if algorithm in ("one-shot", "recursive-doubling")
                or (algorithm == "ring" and collective == "broadcast")
                else size
            )
            return MIB if chunks == 1 else max(4 * KIB, min(256 * KIB, SLOT_BYTES // chunks) // 64 * 64)
        return max(4 * KIB, min(512 * KIB, _SCRATCH_LIMIT // (2 * size)) // 64 * 64)

    def _overlaps(self, algorithm: str, medium: Medium) -> bool:
        """Pushed results are written back while they are in cache: nothing comes in between. Everything else overlaps
        its rounds."""
        return not (medium is Medium.DIRECT and algorithm == "direct")


def medium_between(placement: Placement, medium: Medium) -> Callable[[int, int], Medium]:
    """How two ranks exchange blocks: by ``medium`` on one host, by messages across."""
    host_of = {rank: number for number, host in enumerate(placement.hosts) for rank in host}
    if medium is Medium.MESSAGE:
        return lambda a, b: Medium.MESSAGE
    return lambda a, b: medium if host_of[a] == host_of[b] else Medium.MESSAGE


def describe(
    placement: Placement, sizes: Sequence[int], planner: Planner | None = None
) -> list[tuple[str, int, Choice]]:
    """What would be chosen for each collective and size, as rows of (collective, bytes, choice)."""
    planner = planner or Planner(placement)
    return [
        (collective, nbytes, planner.choose(collective, nbytes, native=True))
        for collective in _ALGORITHMS
        for nbytes in sizes
    ]
