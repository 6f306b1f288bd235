"""The device planner: chooses algorithm, transport and number of segments.

    cuda-ipc   kernels that access the peers' device memory; between hosts messages through page-locked memory
    nccl       schedules over NCCL's send and receive, or NCCL's own collectives (algorithm "native")
    host       the host's engine, between copies in page-locked host memory

As in `collectives.plan.planner`, the choice depends only on facts that all ranks share: the bytes, the placement of
ranks and GPUs, the transports that work, and the measured limit up to which the host is the fastest (`calibration`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from collectives.base.config import DEVICE_TRANSPORTS as TRANSPORTS
from collectives.base.errors import InvalidArgumentError, TransportError
from collectives.device.kernel_sources import WAYS
from collectives.plan import planner
from collectives.plan.planner import Placement
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm

MIB = 1 << 20

_PIPELINE_FROM = 4 * MIB
"""Bytes of a chunk from which reducing one half while the other travels saves more than its launches cost, 20 µs."""
_CHAIN_SEGMENT = 4 * MIB
_MOST_CHAIN_SEGMENTS = 16
_DIRECT_UNTIL = 4 * MIB
"""Bytes of an all-reduce up to which one kernel over CUDA IPC is chosen even if each rank has a GPU of its own; beyond
that, NCCL, which knows the links."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the ranks have found out together.

    Attributes:
        ipc, nccl: why this transport is not available; empty if it is.
        shares_gpus: whether several ranks use one GPU.
        host_until: bytes of an all-reduce up to which the host transport is the fastest.
    """

    ipc: str = ""
    nccl: str = ""
    shares_gpus: bool = False
    host_until: int = 0


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """The planner's decision for one call."""

    algorithm: str
    transport: str
    segments: int = 1
    pipelined: bool = False
    """Whether one segment is reduced while another travels."""
    stepwise: bool = False
    """Whether halves are rounded after every addition, as on the host."""
    why: str = field(default="", compare=False)
    """The reasons for the algorithm and the transport."""

    @property
    def native(self) -> bool:
        """Whether NCCL carries out the whole collective."""
        return self.algorithm == registry.NATIVE


class DevicePlanner:
    """Chooses for device tensors.

    Args:
        facts: the same on every rank.
        transport: set for all calls by the environment, or "auto".
    """

    def __init__(self, placement: Placement, facts: DeviceFacts, transport: str = "auto") -> None:
        self._placement = placement
        self._transport = transport
        self.facts = facts

    def learn(self, host_until: int) -> None:
        """Set the measured limit of the host transport."""
        self.facts = replace(self.facts, host_until=host_until)

    def choose(
        self,
        collective: str,
        nbytes: int,
        *,
        native: bool = False,
        algorithm: str | None = None,
        transport: str | None = None,
    ) -> DeviceChoice:
        """Decide for one call.

        Args:
            nbytes: as for `collectives.plan.planner.Planner.choose`.
            native: whether NCCL reduces this dtype and operation as we do; True for collectives that only move data.
            algorithm, transport: set for this call; None or "auto": chosen here.

        Raises:
            InvalidArgumentError: there is no such algorithm or transport.
            TransportError: it exists, but is not available to these ranks.
        """
        names = registry.on_gpu(collective)
        native = native and registry.NATIVE in names
        reproducible = planner.is_reproducible(collective, algorithm)
        native = native and not reproducible
        forced = None
        if not reproducible:
            forced = planner.forced_algorithm(collective, algorithm, names, self._placement.hosts, " of GPU tensors")
        chosen, why_transport = self._medium(collective, nbytes, forced, transport, native)
        if reproducible and self._placement.size > WAYS:
            chosen, why_transport = "host", f"a kernel combines up to {WAYS} ranks by the fixed tree"
        if chosen == "host" and not (forced and forced.native):
            return DeviceChoice(forced.name if forced else "auto", "host", stepwise=reproducible, why=why_transport)
        if forced:
            entry, why_algorithm = forced, "algorithm as requested"
        else:
            name, why_algorithm = self._choose_algorithm(collective, chosen, native, reproducible)
            entry = registry.find(collective, name)
        if entry.native and (chosen != "nccl" or not native):
            why = f"NCCL has no {collective} for these elements" if chosen == "nccl" else f"the transport is {chosen}"
            raise InvalidArgumentError(
                f"algorithm='native' is NCCL's own collective, but {why}; pass algorithm='ring' or 'direct' [A50]"
            )
        if entry.spans_hosts and chosen == "nccl":
            raise InvalidArgumentError(
                f"algorithm={entry.name!r} needs transport='cuda-ipc', got transport='nccl'; pass "
                "transport='cuda-ipc', or algorithm='native', which is NCCL's own [A51]"
            )
        if chosen == "cuda-ipc" and not self._placement.one_host and not entry.spans_hosts:
            spanning = [name for name in names if registry.find(collective, name).spans_hosts]
            use = ", ".join(map(repr, (*spanning, "nccl"))) + " or 'host'"
            raise TransportError(
                f"transport='cuda-ipc': {collective} with {entry.name} stays on one host; use {use} [A52]"
            )
        why = f"{why_algorithm}; {why_transport}"
        return replace(self._segmented(entry, chosen, nbytes), stepwise=reproducible, why=why)

    def _medium(
        self, collective: str, nbytes: int, algorithm: Algorithm | None, transport: str | None, native: bool
    ) -> tuple[str, str]:
        """The transport, and why."""
        facts, one_host = self.facts, self._placement.one_host
        forced = self._transport if transport in (None, "auto") else str(transport)
        if forced != "auto":
            if forced not in TRANSPORTS:
                raise InvalidArgumentError(
                    f"transport={forced!r}: expected one of auto, {', '.join(TRANSPORTS)} for GPU tensors [A53]"
                )
            why = {"cuda-ipc": facts.ipc, "nccl": facts.nccl}.get(forced)
            if why:
                raise TransportError(f"transport={forced!r}: {why} [A54]")
            return forced, "transport as requested"
        if algorithm is not None and algorithm.native:
            if facts.nccl:
                raise TransportError(f"algorithm='native': {facts.nccl} [A55]")
            return "nccl", "NCCL's own algorithm"
        if algorithm is not None and algorithm.spans_hosts:
            return ("host", facts.ipc) if facts.ipc else ("cuda-ipc", "within hosts, and messages between them")
        if algorithm is None and collective == "allreduce" and nbytes <= facts.host_until:
            return "host", f"host memory up to {facts.host_until} bytes, as measured"
        spans = algorithm is None and collective == "allreduce"
        nearby = not facts.ipc and (one_host or spans)
        if facts.nccl:
            return (
                ("cuda-ipc", "NCCL is not available")
                if nearby
                else ("host", "neither CUDA IPC nor NCCL connects all ranks")
            )
        # NCCL seldom helps ranks that share a GPU; between hosts nothing else knows the network's path to GPUs.
        if nearby and one_host and (facts.shares_gpus or nbytes <= _DIRECT_UNTIL or not native):
            return "cuda-ipc", "ranks of one host"
        return "nccl", "NCCL uses the links between the GPUs"

    def _choose_algorithm(self, collective: str, transport: str, native: bool, reproducible: bool) -> tuple[str, str]:
        """The algorithm, and why."""
        nccl, hosts = transport == "nccl", self._placement.hosts
        spans = not nccl and len(hosts) > 1 and collective == "allreduce"
        table = (
            (nccl and native, "native", "NCCL has the collective"),
            (nccl and collective != "alltoall", "ring", "NCCL does not reduce these elements"),
            (spans, "hierarchical", "several hosts"),
            (spans, registry.REPRODUCIBLE, "the fixed tree, over several hosts"),
            (True, "direct", "each block goes straight to the ranks that need it"),
        )
        return next(
            (name, why)
            for applies, name, why in table
            if applies and (not reproducible or registry.find(collective, name).keeps_order(hosts))
        )

    def _segmented(self, algorithm: Algorithm, transport: str, nbytes: int) -> DeviceChoice:
        choice, size = DeviceChoice(algorithm.name, transport), self._placement.size
        if transport != "nccl" or not algorithm.passes_on:
            return choice
        if algorithm.one_chunk and size > 2:
            return replace(choice, segments=max(1, min(_MOST_CHAIN_SEGMENTS, nbytes // _CHAIN_SEGMENT)))
        if algorithm.collective in ("allreduce", "reducescatter") and nbytes // size >= _PIPELINE_FROM:
            return replace(choice, segments=2, pipelined=True)
        return choice
