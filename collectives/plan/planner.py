"""The planner: which algorithm, through which medium, in blocks of what size.

The choice depends on facts that all ranks share (the collective, the bytes, where the ranks are, what their hosts
allow), so that every rank makes the same one without communicating. The crossovers were measured with ``benchmarks``
(see ``docs/architecture.md``); an argument or the environment overrules any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.plan.program import Medium
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.tensors.arena import MAPPED_FROM
from collectives.transport.base import SLOT_BYTES

KIB, MIB = 1 << 10, 1 << 20

MAPPED_BLOCK_BYTES = 256 * KIB
"""Bytes of a mapped tensor that are combined at once: so many of two tensors fit into a core's cache."""
DIRECT_BLOCK_BYTES = MIB
"""Bytes of a private tensor of a bucket that are combined at once: in smaller blocks, system calls cost more than the
cache saves."""
PACKED_TENSOR = 16 * KIB
"""Bytes up to which packing a tensor of a bucket into a window takes less time than combining it where it lies."""
LARGE_TENSOR = 4 * MIB
"""Bytes from which a private tensor takes less time by direct reads than packed into windows with others."""
_SCRATCH_LIMIT = 24 * MIB
_TCP = "tcp"
"""Messages, as a transport of one call, where TCP carries them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the ranks are, and how ranks of one host reach each other.

    Attributes:
        hosts: the ranks on each host.
        shares_memory: whether the ranks of a host share windows and a board.
        reads_private: whether a process may read its peers' private memory.
        maps: whether the ranks of a host may map each other's arenas.
        carries: whether the control plane carries data along with the ranks' tokens.
        network: what carries messages: "mpi", "tcp" or "threads"; empty where that is not known.
    """

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]
    shares_memory: bool
    reads_private: bool
    maps: bool = False
    carries: bool = False
    network: str = ""

    @property
    def one_host(self) -> bool:
        return len(self.hosts) == 1


@dataclass(frozen=True, slots=True)
class Choice:
    """The planner's decision for one call."""

    algorithm: str
    medium: Medium
    """How ranks on one host exchange blocks; ranks on different hosts pass messages."""
    block_bytes: int
    """Bytes of each chunk that one segment takes."""
    overlap: bool
    """Whether the rounds of different segments overlap."""
    why: str = field(default="", compare=False)
    """The reasons for the algorithm and the medium."""

    @property
    def native(self) -> bool:
        """Whether MPI carries out the whole collective."""
        return self.algorithm == registry.NATIVE

    @property
    def inline(self) -> bool:
        """Whether the data travels with the words of the round."""
        return self.algorithm == registry.INLINE


@dataclass(frozen=True, slots=True)
class Crossovers:
    """Bytes up to which each choice holds: of the tensor for an all-reduce, of all chunks together for the others."""

    one_shot: int = 32 * KIB
    """All-reduce in one round, in which every rank reads everything from all others."""
    window: int = 512 * KIB
    """Windows; beyond, direct reads of the peers' private memory where they are allowed."""
    window_moves: int = 512 * KIB
    """The same for collectives that only move data, where a direct read saves a copy."""
    flat_broadcast: int = 128 * KIB
    """Broadcast in one round, in which every rank reads everything from the root; beyond, the ranks share the work."""
    native: int = 2 * KIB
    """MPI's own all-reduce, over messages."""
    doubling: int = 32 * KIB
    """Recursive doubling over messages: this times the ranks over their binary logarithm."""
    straight: int = 512 * KIB
    """Bytes up to which 3 or 4 ranks on as many hosts send each other blocks straight over TCP. Beyond, a ring takes
    0.93 of the time, because every link into a host then has one sender."""
    inline: int = 64 * KIB
    """Bytes that a rank receives from all others, where the data travels with the words of the round."""


_AS_ASKED = "algorithm as requested"


def is_reproducible(collective: str, algorithm: str | None) -> bool:
    """Whether a call asks for any algorithm that combines by the fixed tree."""
    return algorithm == registry.REPRODUCIBLE and collective in ("allreduce", "reducescatter")


def forced_algorithm(
    collective: str,
    algorithm: str | None,
    names: Sequence[str],
    hosts: Sequence[Sequence[int]],
    tensors: str = "",
) -> Algorithm | None:
    """The algorithm that a call forces, or None where it leaves the choice to the planner.

    Args:
        names: of the algorithms to choose from.
        hosts: the ranks on each host.
        tensors: which tensors these are for, for the message.

    Raises:
        InvalidArgumentError: it is not among ``names``, or does not serve so many ranks.
    """
    if algorithm in (None, "auto"):
        return None
    if isinstance(algorithm, str):
        algorithm = registry.unsigned(algorithm)
    if algorithm not in names:
        raise InvalidArgumentError(
            f"algorithm={algorithm!r}: expected one of auto, {', '.join(names)} for {collective}{tensors} [A57]"
        )
    chosen = registry.find(collective, algorithm)
    if chosen.why_not(hosts):
        raise InvalidArgumentError(f"{collective}: {chosen.why_not(hosts)}")
    return chosen


class Planner:
    """Chooses algorithm, medium and block size for the calls of a group. The reasons are in `Choice.why`, which
    `collectives.plan.builder.Plans.log_choice` logs.

    Args:
        algorithm, transport, segment: forced for every call by the environment ("auto", "auto", 0: not forced).
        crossovers: where the choice changes with the size.

    Attributes:
        epoch: rises when choices may differ from earlier ones, which invalidates plans.
        reproducible: whether reductions for which a call names no algorithm are to be reproducible.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        algorithm: str = "auto",
        transport: str = "auto",
        segment: int = 0,
        crossovers: Crossovers | None = None,
        reproducible: bool = False,
    ) -> None:
        self.placement = placement
        self.crossovers = crossovers or Crossovers()
        self.epoch = 0
        self.reproducible = reproducible
        self._set_algorithm(algorithm)
        self._why_algorithm = _AS_ASKED
        self._transport = transport
        self._segment = segment

    def choose(
        self,
        collective: str,
        nbytes: int,
        *,
        native: bool = False,
        ordered: bool = False,
        mapped: bool = False,
        pieces: int = 1,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> Choice:
        """Decide for one call.

        Args:
            nbytes: bytes of all chunks together; of the largest sum over ranks where they differ.
            native: whether MPI knows the dtype and the operation.
            ordered: a op b and b op a differ in bits (a product of complex numbers), so that each element must be
                reduced on one rank for all ranks to get the same.
            mapped: the tensors of all ranks are in their arenas; only where `locates_tensors`.
            pieces: tensors that are reduced as one.
            algorithm, transport: forced for this call; None or "auto": not. "reproducible": one of those that combine
                by the fixed tree.

        Raises:
            InvalidArgumentError: the collective has no such algorithm, or no such transport is known.
            TransportError: it is known, but cannot serve these ranks.
        """
        names, size, hosts = registry.on_host(collective), self.placement.size, self.placement.hosts
        reproducible = is_reproducible(collective, algorithm)
        if reproducible and ordered:
            raise InvalidArgumentError(
                "algorithm='reproducible' cannot multiply complex numbers, because vectorized and scalar code round "
                "the product differently; multiply the real and imaginary parts yourself [A80]"
            )
        forced = None if reproducible else forced_algorithm(collective, algorithm, names, hosts)
        why_forced = _AS_ASKED
        if forced is None and collective in self._served:
            set_for_all = forced_algorithm(collective, self._algorithm, names, hosts)
            if set_for_all and (not reproducible or set_for_all.keeps_order(hosts)):
                forced, why_forced = set_for_all, self._why_algorithm
        medium, why_medium = self._medium(collective, nbytes, transport, forced, mapped, pieces)
        if size == 1:  # Nothing moves: every algorithm and every transport serves.
            return Choice(forced.name if forced else "direct", medium, 0, False, "one rank")
        if forced is not None:
            chosen, why = forced, why_forced
        else:
            native_serves = native and not ordered
            name, why = self._choose_algorithm(collective, nbytes, medium, native_serves, ordered, reproducible)
            chosen = registry.find(collective, name)
        if not chosen.by_messages and not (medium is Medium.WINDOW and self.placement.one_host):
            raise TransportError(
                f"algorithm={chosen.name!r} works only through shared memory on one host, got transport "
                f"{medium.value} and {len(self.placement.hosts)} hosts; leave algorithm out, or pass another [A58]"
            )
        if chosen.versioned and medium.in_place:
            medium, why_medium = Medium.WINDOW, f"window, which {chosen.name} needs"
        if chosen.name == registry.INLINE and not self.placement.carries:
            raise TransportError(
                "algorithm='inline' needs ranks that coordinate over TCP; leave algorithm out, or pass another [A59]"
            )
        if chosen.name == registry.NATIVE and not native:
            raise InvalidArgumentError(
                "algorithm='native' is MPI's own all-reduce, which is not available for this call: MPI is not in "
                "use, or would reduce this dtype and op differently; leave algorithm out, or pass another [A60]"
            )
        overlaps = chosen.overlaps or not medium.in_place
        return Choice(chosen.name, medium, self._block(chosen, nbytes, medium), overlaps, f"{why}; {why_medium}")

    def check_order(self, collective: str, algorithm: str | None) -> None:
        """Check an algorithm that a call names although all reductions are to be reproducible.

        Raises:
            InvalidArgumentError: it does not combine by the fixed tree.
        """
        if is_reproducible(collective, algorithm):
            return
        names = registry.on_host(collective) + registry.on_gpu(collective)
        forced = forced_algorithm(collective, algorithm, names, self.placement.hosts)
        if forced is not None and not forced.keeps_order(self.placement.hosts):
            raise InvalidArgumentError(
                f"algorithm={algorithm!r} adds in an order that depends on the message's size and on which hosts the "
                "ranks are, but COLLECTIVES_REPRODUCIBLE requires a fixed order; leave algorithm out, or unset "
                "COLLECTIVES_REPRODUCIBLE on all ranks [A81]"
            )

    def locates_tensors(self, nbytes: int, transport: str | None = None) -> bool:
        """Whether ranks tell each other where their tensors of ``nbytes`` bytes lie, to reach mapped ones in place."""
        forced = self._transport if transport in (None, "auto") else transport
        placement = self.placement
        return (
            # Not among the crossovers, because it decides whether words travel with a request.
            nbytes >= MAPPED_FROM
            and forced in ("auto", Medium.MAPPED.value)
            and placement.maps
            and placement.one_host
            and placement.size > 1
        )

    def locates_bucket(
        self, nbytes: int, pieces: int, algorithm: str | None = None, transport: str | None = None
    ) -> bool:
        """`locates_tensors`, of ``pieces`` tensors that are reduced as one: not of small ones, on average."""
        return (
            nbytes > max(self.crossovers.window, pieces * PACKED_TENSOR)
            and self.locates_tensors(nbytes, transport)
            and (self._algorithm if algorithm in (None, "auto") else algorithm)
            in ("auto", "direct", registry.REPRODUCIBLE)
        )

    def change(self, *, algorithm: str, segment: int, crossovers: Crossovers) -> None:
        """Replace the settings. Every rank does so between the same two operations."""
        if registry.unsigned(algorithm) != self._algorithm:
            self._why_algorithm = "algorithm as tuned"
        self._set_algorithm(algorithm)
        self._segment, self.crossovers = segment, crossovers
        self.epoch += 1

    def _set_algorithm(self, algorithm: str) -> None:
        self._algorithm = registry.unsigned(algorithm)
        # Not those registered later, which the ranks have not compared.
        self._served = {name for name in registry.COLLECTIVES if self._algorithm in registry.on_host(name)}

    def _medium(
        self,
        collective: str,
        nbytes: int,
        transport: str | None,
        algorithm: Algorithm | None,
        mapped: bool,
        pieces: int,
    ) -> tuple[Medium, str]:
        """The medium, and why."""
        forced = self._transport if transport in (None, "auto") else transport
        placement, limits = self.placement, self.crossovers
        if forced == Medium.MAPPED.value and not placement.maps and placement.size > 1:
            raise TransportError(
                "transport='mapped': the ranks of a host cannot map each other's memory here (containers may refuse "
                "/proc/PID/fd); pass transport='auto' [A61]"
            )
        if forced in ("auto", Medium.MAPPED.value):
            if mapped and self._serves_mapped(collective, algorithm):
                return Medium.MAPPED, "the tensors of all ranks are mapped"
            limit = limits.window if collective in ("allreduce", "reducescatter") else limits.window_moves
            if not placement.shares_memory:
                return Medium.MESSAGE, "the ranks of a host cannot share memory"
            if placement.size > 1 and all(len(host) == 1 for host in placement.hosts):
                return Medium.MESSAGE, "one rank on each host"
            if nbytes <= limit:
                return Medium.WINDOW, f"window up to {limit} bytes"
            if pieces > 1 and placement.one_host:
                return Medium.WINDOW, "window, into which several tensors are packed"
            if algorithm is not None and algorithm.versioned:
                return Medium.WINDOW, f"window, which {algorithm.name} needs"
            if not placement.reads_private:
                return Medium.WINDOW, "window, because this system does not let a process read its peers' memory"
            return Medium.DIRECT, f"direct reads above {limit} bytes"
        if forced == _TCP and placement.size > 1 and placement.network not in ("", _TCP):
            raise TransportError(
                f"transport='tcp': these ranks send their messages over {placement.network}, not over TCP; set "
                "COLLECTIVES_TRANSPORT=tcp on all ranks before init(), or pass transport='mpi', which sends messages "
                "over any network [A62]"
            )
        by_name = {medium.value: medium for medium in Medium} | {_TCP: Medium.MESSAGE}
        medium = by_name.get(forced)
        if medium is None:
            raise InvalidArgumentError(f"transport={forced!r}: expected one of auto, {', '.join(by_name)} [A63]")
        if placement.size == 1:
            return medium, "one rank"
        if medium is Medium.WINDOW and not placement.shares_memory:
            raise TransportError(
                "transport='window': the ranks of a host cannot share memory here; pass transport='mpi', which sends "
                "messages over any network, or 'auto' [A64]"
            )
        if medium is Medium.DIRECT and not placement.reads_private:
            raise TransportError(
                "transport='direct-read': this system does not let a process read the memory of other processes "
                "(containers may refuse process_vm_readv); pass transport='window' or 'auto' [A65]"
            )
        return medium, "medium as requested"

    def _serves_mapped(self, collective: str, algorithm: Algorithm | None) -> bool:
        """Whether a forced algorithm can read and write the ranks' tensors where they lie."""
        if algorithm is None:
            return True
        # A gather's result may be private although the ranks' tensors are mapped.
        reads_result = algorithm.passes_on and collective in ("allgather", "alltoall")
        return not algorithm.versioned and (self.placement.reads_private or not reads_result)

    def _choose_algorithm(
        self, collective: str, nbytes: int, medium: Medium, native: bool, ordered: bool, reproducible: bool
    ) -> tuple[str, str]:
        """The algorithm, and why: the first row of the collective's table that applies."""
        limits, size = self.crossovers, self.placement.size
        # It saves about two messages for each rank, and sends the tensor once for each bit of their number.
        doubling = limits.doubling * size // max(1, (size - 1).bit_length())
        messages = medium is Medium.MESSAGE
        across = messages or not self.placement.one_host
        table: tuple[tuple[bool, str, str], ...]
        if collective == "allreduce" and across:
            table = (
                (
                    self.placement.carries and nbytes * (size - 1) <= limits.inline,
                    registry.INLINE,
                    f"data is sent with the coordination messages, up to {limits.inline} bytes from all peers",
                ),
                (native and nbytes <= limits.native, "native", f"MPI's own, up to {limits.native} bytes over messages"),
                (
                    nbytes <= doubling and not ordered,
                    "recursive-doubling",
                    f"fewest messages, up to {doubling} bytes",
                ),
                (not messages, "hierarchical", "several hosts with ranks that share memory"),
                (size == 2, "direct", "2 ranks over messages"),
                (
                    self.placement.carries and nbytes > limits.straight,
                    "ring",
                    f"above {limits.straight} bytes over TCP",
                ),
                (size <= 4, "direct", "up to 4 ranks over messages"),
                (reproducible, registry.REPRODUCIBLE, "the fixed tree, over several hosts or more than 4 ranks"),
                (True, "ring", "more than 4 ranks over messages"),
            )
        elif collective == "allreduce":
            table = (
                (
                    medium is Medium.WINDOW and nbytes <= limits.one_shot and not ordered,
                    "one-shot",
                    f"one round, up to {limits.one_shot} bytes",
                ),
                (True, "direct", "ranks of one host"),
            )
        elif collective == "broadcast" and across:
            table = (
                (nbytes <= doubling, "recursive-doubling", f"messages, up to {doubling} bytes"),
                (True, "ring", f"above {doubling} bytes"),
            )
        elif collective == "broadcast":
            table = (
                (
                    nbytes <= limits.flat_broadcast,
                    "one-shot",
                    f"every rank reads the whole tensor, up to {limits.flat_broadcast} bytes",
                ),
                (True, "direct", f"above {limits.flat_broadcast} bytes"),
            )
        else:
            table = (
                (messages and size > 8 and collective != "alltoall", "ring", "more than 8 ranks over messages"),
                (True, "direct", "each block goes straight to the ranks that need it"),
            )
        hosts = self.placement.hosts
        return next(
            (name, why)
            for applies, name, why in table
            if applies and (not reproducible or registry.find(collective, name).keeps_order(hosts))
        )

    def _block(self, algorithm: Algorithm, nbytes: int, medium: Medium) -> int:
        """Bytes per chunk and segment: small enough for the caches, large enough for Python."""
        size = self.placement.size
        if self._segment:
            return max(64, self._segment // 64 * 64)
        if medium is Medium.WINDOW:
            return MIB if algorithm.one_chunk else max(4 * KIB, min(256 * KIB, SLOT_BYTES // size) // 64 * 64)
        scratch = _SCRATCH_LIMIT // (2 * size)
        if medium is Medium.MESSAGE:
            return max(4 * KIB, min(512 * KIB, scratch) // 64 * 64)
        if algorithm.overlaps:
            return 512 * KIB
        if medium is Medium.MAPPED and algorithm.collective in ("allreduce", "reducescatter"):
            return MAPPED_BLOCK_BYTES
        if algorithm.collective not in ("allreduce", "reducescatter"):
            return 32 * MIB
        block = MIB if nbytes <= 8 * MIB else 512 * KIB
        return block if self.placement.one_host else min(block, max(4 * KIB, scratch // 64 * 64))


def medium_between(placement: Placement, medium: Medium) -> Callable[[int, int], Medium]:
    """How two ranks exchange blocks: by ``medium`` on one host, by messages between hosts."""
    if medium is Medium.MESSAGE:
        return lambda a, b: Medium.MESSAGE
    host_of = {rank: number for number, host in enumerate(placement.hosts) for rank in host}
    return lambda a, b: medium if host_of[a] == host_of[b] else Medium.MESSAGE


def describe(
    placement: Placement, sizes: Sequence[int], planner: Planner | None = None
) -> list[tuple[str, int, Choice]]:
    """The planner's choice for each collective and size, as rows of (collective, bytes, choice)."""
    planner = planner or Planner(placement)
    return [
        (collective, nbytes, planner.choose(collective, nbytes, native=not placement.carries))
        for collective in registry.COLLECTIVES
        for nbytes in sizes
    ]
