"""How the ranks of one world reach each other's GPUs: CUDA IPC, NCCL, and messages through page-locked memory.

The ranks connect in the first operation on a device tensor, in which all of them take part: they exchange the
identities of their GPUs, try to map each other's memory, and agree on what works. NCCL is connected then if the planner
is going to choose it, and otherwise by the first operation that needs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from collectives.base.config import Config
from collectives.base.errors import CollectivesError, TransportError, bare, of_rank
from collectives.base.interchange import exchangeable
from collectives.base.logging import logger
from collectives.cuda.completion import Wait
from collectives.cuda.executor import DeviceExecutor
from collectives.cuda.messages import NcclMessages, StagedMessages
from collectives.cuda.planner import DeviceFacts, DevicePlanner
from collectives.cuda.transfer import DeviceBuffers
from collectives.device.protocol import Device
from collectives.engine.context import Context
from collectives.transport.cuda import nccl
from collectives.transport.cuda.cuda_ipc import Card, IpcMemory
from collectives.transport.cuda.issue_order import Turn
from collectives.transport.cuda.nccl_library import NcclCommunicator

_CONNECT_WITHIN = 120.0
"""Seconds for NCCL to connect ranks that are all present; beyond, another transport is used."""


class ConnectError(TransportError):
    """NCCL cannot connect the ranks. Raised on all of them, before any data was moved."""


@exchangeable
class _DeviceInfo(NamedTuple):
    """What each rank tells the others before they connect; ``no_ipc`` and ``no_nccl`` are reasons, empty if there are
    none."""

    identity: str
    card: Card | None
    no_ipc: str
    no_nccl: str
    nccl_shares_gpus: bool


class Connection:
    """The transports between the GPUs of one world's ranks.

    Args:
        events: number of interprocess events that peers may wait for.
        keep: keeps an object alive until the device is known to be idle.

    Attributes:
        established: whether the ranks have connected.
        planner: chooses algorithm and transport, once the ranks have connected.
        communicators: NCCL's, at most one; the watchdog looks after them.
    """

    def __init__(
        self,
        context: Context,
        config: Config,
        device: Device,
        executor: DeviceExecutor,
        buffers: DeviceBuffers,
        events: int,
        wait: Wait,
        turn: Turn,
        keep: Callable[[Any], None],
    ) -> None:
        self.established = False
        self.planner: DevicePlanner
        self.communicators: list[NcclCommunicator] = []
        self._context, self._config = context, config
        self._device, self._executor, self._buffers = device, executor, buffers
        self._events = events
        self._wait = wait
        self._turn = turn
        self._keep = keep
        self._nccl_failure: ConnectError | None = None
        self._staged: StagedMessages | None = None
        self._sharers = 1
        """The largest number of ranks that use one GPU."""

    def establish(self) -> None:
        """Connect the ranks; collective, once."""
        context, group = self._context, self._context.group
        exchange = context.control.exchange
        memory, card, no_ipc = self._offer_memory()
        library = nccl.library()
        own_info = _DeviceInfo(self._device.identity, card, no_ipc, library.why_not() or "", library.shares_gpus())
        every: list[_DeviceInfo] = exchange(own_info)
        no_ipc = self._map_memory(memory, every)
        # Not by the number of visible GPUs, which is 1 for all ranks if each is shown a GPU of its own.
        self._sharers = max(max(Counter(every[peer].identity for peer in host).values()) for host in group.hosts)
        shares = self._sharers > 1
        no_nccl = _first(every, "no_nccl")
        if not no_nccl and shares and not all(info.nccl_shares_gpus for info in every):
            no_nccl = (
                "several ranks share one GPU, which NCCL supports only from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1; "
                "start fewer ranks, or use 'cuda-ipc'"
            )
        wants_nccl = self._config.device_transport in ("auto", "nccl")
        if not no_nccl and wants_nccl and (not shares or no_ipc or len(group.hosts) > 1):
            # The planner is going to choose NCCL: connect now, while another transport can still be chosen instead.
            try:
                self.communicator()
            except ConnectError as error:
                no_nccl = bare(context.rank, error)
        facts = DeviceFacts(no_ipc, no_nccl, shares)
        self.planner = DevicePlanner(context.planner.placement, facts, self._config.device_transport)
        if group.messages is not None and len(group.hosts) > 1:
            self._staged = StagedMessages(self._device, group.messages, self._wait)
            self._keep(self._staged)
        # Where ranks share a GPU, the driver's scheduling of graphs could make one rank wait for another for ever.
        self._executor.graphs = self._config.cuda_graphs and not shares
        self._report(facts, every)
        self.established = True

    def _offer_memory(self) -> tuple[IpcMemory | None, Card | None, str]:
        """This rank's memory and card for CUDA IPC, or the reason why there is none."""
        group, memory = self._context.group, None
        if group.memory is None:
            return None, None, "the ranks of a host cannot share memory here"
        if len(group.local) == 1:
            return None, None, ""
        try:
            memory = IpcMemory(self._context.rank, self._device, self._events, self._wait)
            return memory, memory.card(self._executor.main), ""
        except CollectivesError as error:
            return memory, None, str(error)

    def _map_memory(self, memory: IpcMemory | None, every: list[_DeviceInfo]) -> str:
        """Map the memory of the host's other ranks if all ranks can; the reason if they cannot, the same on every
        rank."""
        exchange = self._context.control.exchange
        no_ipc = _first(every, "no_ipc")
        if not no_ipc:
            try:
                if memory is not None:
                    cards = {peer: card for peer in self._context.group.local if (card := every[peer].card) is not None}
                    memory.connect(cards, self._executor.main)
            except CollectivesError as error:
                no_ipc = str(error)
            no_ipc = next(filter(None, exchange(no_ipc)), "")
        if not no_ipc:
            self._executor.memory = memory
            return ""
        if memory is not None:
            memory.forget()
        exchange(None)  # until every rank has unmapped the others' memory
        if memory is not None:
            memory.close()
        return no_ipc

    def _report(self, facts: DeviceFacts, every: list[_DeviceInfo]) -> None:
        """Log once, on rank 0, how the ranks reach each other."""
        if self._context.rank or self._turn.reported:
            return
        self._turn.reported = True
        ranks, gpus = len(every), len({info.identity for info in every})
        how = ", ".join(f"{name} ({why or 'yes'})" for name, why in (("CUDA IPC", facts.ipc), ("NCCL", facts.nccl)))
        logger.info("GPU tensors: %d ranks on %d GPUs; %s", ranks, gpus, how)
        if facts.shares_gpus:
            logger.warning(
                "%d ranks share %d GPU%s: they take turns on it, by CUDA IPC [G16]", ranks, gpus, "s" * (gpus > 1)
            )
        if facts.ipc and len(self._context.group.local) > 1:
            detour = "through NCCL" if not facts.nccl else "through host memory, which is slower"
            logger.warning("CUDA IPC cannot be used (%s): GPU tensors go %s [G17]", facts.ipc, detour)
        if self._nccl_failure is not None:
            detour = "through host memory" if facts.ipc else "by CUDA IPC"
            logger.warning("%s; GPU tensors go %s [G18]", bare(self._context.rank, self._nccl_failure), detour)

    def communicator(self) -> NcclCommunicator:
        """NCCL's communicator of these ranks; created by the first call, which is collective.

        Raises:
            ConnectError: NCCL cannot connect the ranks; the same on all of them, in this call and in later ones.
        """
        if self.communicators:
            return self.communicators[0]
        if self._nccl_failure is not None:
            raise self._nccl_failure
        rank, size = self._context.rank, self._context.size
        library, timeout = nccl.library(), min(_CONNECT_WITHIN, self._config.timeout)
        connect = partial(library.connect, sharers=self._sharers)
        made: list[NcclCommunicator] = []
        # Allocated before any rank's kernel can wait for this rank: see `transfer.DeviceBuffers`.
        scratch = self._buffers.get("greetings", 2 * size)
        self._wait()
        try:
            unique = self._context.control.exchange(self._together(lambda: library.make_id() if rank == 0 else b""))[0]
            self._together(lambda: made.append(connect(rank, size, unique, timeout, self._device)))
            self._together(lambda: nccl.warm_up(made[0], self._device, scratch, self._executor.main, timeout))
        except ConnectError as error:
            self._nccl_failure = error
            for communicator in made:
                communicator.abort()
            raise
        self.communicators += made
        return made[0]

    def _together(self, step: Callable[[], Any]) -> Any:
        """Run ``step``, which may fail on one rank alone; raises ConnectError for the same reason on all ranks if it
        does."""
        rank, result, problem = self._context.rank, None, ""
        try:
            result = step()
        except CollectivesError as error:
            problem = str(error)
        problem = next(filter(None, self._context.control.exchange(problem)), "")
        if problem:
            raise ConnectError(f"rank {rank}: NCCL cannot connect these ranks: {bare(rank, problem)} [G22]")
        return result

    def use_messages(self, transport: str) -> None:
        """Set the transport of the executor's messages: "nccl", or "mpi" for page-locked host memory."""
        self._executor.messages = NcclMessages(self.communicator()) if transport == "nccl" else self._staged

    def close(self) -> None:
        """Close the communicator and unmap the peers' memory; the device is idle."""
        for communicator in self.communicators:
            communicator.close()
        if self._executor.memory is not None:
            self._executor.memory.forget()

    def free(self) -> None:
        """Release this rank's own resources, which no peer uses any more."""
        if self._staged is not None:
            self._staged.close()
        if self._executor.memory is not None:
            self._executor.memory.close()


def _first(every: list[_DeviceInfo], reason: str) -> str:
    return next((of_rank(rank, text) for rank, info in enumerate(every) if (text := getattr(info, reason))), "")
