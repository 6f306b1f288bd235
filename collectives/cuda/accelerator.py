"""All that a world has for device tensors: the GPU, streams, kernels, and the ways to its peers.

It is made when the first device tensor comes, and connected when all ranks carry out the first operation on one: then
they show each other their GPUs, try to reach each other's memory, and agree on what works. NCCL is connected when an
operation first needs it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from collectives.base import dtypes
from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    TransportError,
    bare,
    of_rank,
)
from collectives.base.logging import logger
from collectives.base.reduce_op import Op
from collectives.cuda.builder import DevicePlans
from collectives.cuda.completion import Completion, Events, Keeper
from collectives.cuda.executor import DeviceExecutor
from collectives.cuda.messages import NcclMessages, StagedMessages
from collectives.cuda.planner import DeviceFacts, DevicePlanner
from collectives.cuda.request_cache import TensorSpec
from collectives.cuda.transfer import Carrier, Memory
from collectives.device import selection
from collectives.device.kernels import Kernels
from collectives.device.packing import Packing
from collectives.device.protocol import Array, Device, active
from collectives.engine.context import Context
from collectives.engine.request_cache import CachedRequest
from collectives.transport import nccl
from collectives.transport.cuda_ipc import Card, IpcMemory
from collectives.transport.issue_order import Turn
from collectives.transport.nccl import Communicator
from collectives.transport.watchdog import Watch

_SPINS = 200
_NAP = 20e-6
_LOOK_EVERY = 0.1
_CONNECT_WITHIN = 120.0
"""Seconds for NCCL to connect ranks that are all there: one that cannot is found out before users give up, and done
without."""


_unsettled: list[Any] = []
"""Page-locked memory of worlds whose GPU work has not been seen to end, with what uses it: nobody else may have it
until then."""


class ConnectError(TransportError):
    """NCCL cannot connect the ranks: all of them are told so, before anything was moved."""


class _Introduction(NamedTuple):
    """What the ranks tell each other first."""

    identity: str
    card: Card | None
    no_ipc: str
    no_nccl: str
    shares: bool


class Accelerator:
    """The device side of one world.

    Args:
        context: of the world.
        config: of the world.
        local_rank: this rank among those of its host.
        turn: of this rank.
        on_failure: told when work that was under way between the ranks can never end, and has been aborted.

    Attributes:
        connected: whether the ranks have met with their devices.
        calibrated: whether they have found out what is quickest for tiny tensors.
    """

    def __init__(
        self, context: Context, config: Config, local_rank: int, turn: Turn, on_failure: Callable[[Exception], None]
    ) -> None:
        self.context = context
        self.config = config
        self.connected = self.calibrated = False
        self._device: Device | None = None
        self._local_rank = local_rank
        self._turn = turn
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._communicators: list[Communicator] = []
        self._refusal: ConnectError | None = None
        self._staged: StagedMessages | None = None
        self._pinned: dict[str, Array] = {}
        self._packings: set[Packing] = set()
        self._retired: list[Packing] = []
        self._staging: list[Any] = [self._pinned, self._packings, self._retired]
        self._sharers = 1
        """The most ranks that use one GPU."""
        self._last: Completion | None = None
        self._issuing = False

    @property
    def device(self) -> Device:
        """That this rank uses: that of the first device tensor, or, where a rank has none, the one that is its by
        number."""
        assert self._device is not None
        return self._device

    # ---- the device

    def use(self, device: Device | None) -> Device:
        """Use this device from now on; None: whichever is this rank's.

        Raises:
            InvalidArgumentError: this world uses another one already.
        """
        with self._lock:
            if self._device is None:
                override = self.config.device if self.config.device >= 0 else None
                self._make(device or selection.provider().device(selection.choose(self._local_rank, override)))
            elif device is not None and device is not self._device:
                raise InvalidArgumentError(
                    f"tensor: expected device {self.device.index}, on which this rank's first tensor was, got device "
                    f"{device.index}: "
                    f"a rank uses one GPU; give it one with CUDA_VISIBLE_DEVICES, torch.cuda.set_device or "
                    f"cupy.cuda.Device"
                )
            return self.device

    def _make(self, device: Device) -> None:
        with active(device):
            context = self.context
            board = context.group.memory.board if context.group.memory is not None else None
            local = len(context.group.local)
            self._row = max(16, 2 * local + 2 * len(context.group.hosts) + 4)
            self.kernels = Kernels(device)
            self.events = Events(device)
            self.keeper = Keeper()
            self.memory = Memory(device, self.wait)
            self.executor = DeviceExecutor(device, context.rank, context.executor.state, board, self._row)
            self.carrier = Carrier(context.rank, context.size, context.control, device, self.executor, self.memory)
            self.plans = DevicePlans(context.planner.placement, self.kernels)
            self.planner = DevicePlanner(
                context.planner.placement, DeviceFacts("not connected yet", "not connected yet")
            )
            check, abandon = partial(context.control.check, deep=True), self.executor.abandon_graphs
            self._watch = Watch(device, self._communicators, check, self._on_failure, abandon)
            _unsettled.append(self._staging)
            self._device = device

    def active(self) -> active:
        """This rank's device is the calling thread's current one."""
        return active(self.device)

    # ---- between the caller's stream and ours

    def mark(self, stream: int) -> Completion:
        """All that the caller's stream has been given so far."""
        return Completion(self.events, stream)

    def follow(self, mark: Completion) -> None:
        """What is issued from now on comes after it."""
        mark.before(self.executor.main)

    def wait(self, completion: Completion | None = None) -> None:
        """Block until the GPU is done with something; None: with all that was issued. Other threads may run meanwhile.

        Raises:
            RankFailedError: it waits for a rank that is gone.
            CollectiveTimeoutError: it took too long.
        """
        completion = completion or Completion(self.events, self.executor.main)
        control, deadline = self.context.control, time.monotonic() + self.config.timeout
        looks, looked = 0, time.monotonic()
        while not completion.passed():
            looks += 1
            if looks < _SPINS:
                continue
            time.sleep(_NAP)  # the driver's own waits have no bound, and do not look at the peers
            now = time.monotonic()
            if now - looked > _LOOK_EVERY:
                looked = now
                if self._watch.failure is not None:
                    raise self._watch.failure
                control.check(deep=True)
                if now > deadline:
                    raise CollectiveTimeoutError(
                        f"rank {self.context.rank}: waited {self.config.timeout:g} s for the GPU, whose work waits "
                        f"for another rank; "
                        f"see what that is doing, or raise COLLECTIVES_TIMEOUT"
                    )

    def settle(self, within: float) -> bool:
        """Give the GPU so many seconds to be done with all that was issued; whether it is."""
        if self._last is None:
            return True
        deadline = time.monotonic() + within
        with self.active():
            while not self._last.passed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(_NAP)  # as above
        return True

    def complete(self, things: Any) -> Completion:
        """All that was issued until now; ``things`` stay alive until the GPU is done with it."""
        completion = self._last = Completion(self.events, self.executor.main)
        self._issuing = False
        self.keeper.keep(completion, things)
        self._watch.add(completion.event)
        return completion

    def pinned(self, name: str, count: int, dtype: np.dtype[Any]) -> Array:
        """Page-locked host memory by name, as ``count`` elements; it grows when it must."""
        nbytes = count * dtype.itemsize
        found = self._pinned.get(name)
        if found is None or found.nbytes < nbytes:
            self.wait()
            found = self._pinned[name] = self.device.pinned(max(1 << 16, 1 << (nbytes - 1).bit_length()))
        return found[:nbytes].view(dtype)

    def adopt(self, packing: Packing, user: Any) -> Packing:
        """Give the tables back when their user is no more and the GPU is done with everything, by `tidy`; or else at
        the end."""
        self._packings.add(packing)
        # Not at exit: the driver may be gone by then, and takes everything back anyway.
        weakref.finalize(user, self._retired.append, packing).atexit = False
        return packing

    def tidy(self) -> None:
        """Give back what was retired, if the GPU is done. Called before the ranks meet for an operation: to free makes
        the driver wait for the whole device, and no kernel there may be one that waits for this rank."""
        if self._retired and (self._last is None or self._last.passed()):
            while self._retired:
                packing = self._retired.pop()
                packing.close()
                self._packings.discard(packing)

    def twin(self, count: int, dtype: np.dtype[Any], op: Op) -> CachedRequest:
        """The host's entry of an all-reduce of a packed bucket, which leaves all scaling to whoever unpacks it."""
        plain = Op.SUM if op is Op.AVERAGE and not dtypes.is_bool(dtype) else op
        shape: Any = TensorSpec((count,), count, dtype)
        return self.context.entries.reducing("allreduce", shape, None, plain, None, 1.0, 1.0, None, None)

    def take_turn(self) -> None:
        """No other world of these ranks has NCCL work under way from now on, until this one's is done: see
        `collectives.transport.issue_order`."""
        if not self._turn.needed:
            return
        for rank in range(self.context.size):
            if rank == self.context.rank:
                self._issuing = True  # before it is taken: the next one who wants it may ask at any moment
                self._turn.take(
                    self, self.context.rank, self.config.timeout, lambda: self.context.control.check(deep=True)
                )
            self.context.meet(_TURN)

    def busy(self) -> bool:
        """See `turn.Holder`."""
        return self._issuing or (self._last is not None and not self._last.passed())

    # ---- connecting

    def connect(self) -> None:
        """Meet the other ranks with their devices; all ranks are in the same operation. Does nothing the second
        time."""
        if self.connected:
            return
        context, device = self.context, self.device
        exchange, rank, group = context.control.exchange, context.rank, context.group
        memory, card, no_ipc = None, None, ""
        if group.memory is None:
            no_ipc = "the ranks of a host cannot share memory here"
        try:
            if not no_ipc and len(group.local) > 1:
                memory = IpcMemory(rank, device, 2 * self._row, self.wait)
                card = memory.card(self.executor.main)
        except CollectivesError as error:
            no_ipc = str(error)
        library = nccl.library()
        mine = _Introduction(device.identity, card, no_ipc, library.why_not() or "", library.shares_gpus())
        every: list[_Introduction] = exchange(mine)
        no_ipc = _first(every, "no_ipc")
        if not no_ipc:
            try:
                if memory is not None:
                    memory.connect(
                        {peer: card for peer in group.local if (card := every[peer].card) is not None},
                        self.executor.main,
                    )
            except CollectivesError as error:
                no_ipc = str(error)
            no_ipc = next(filter(None, exchange(no_ipc)), "")
        self._sharers = max(selection.sharers([every[peer].identity for peer in host]) for host in group.hosts)
        shares = self._sharers > 1
        no_nccl = _first(every, "no_nccl")
        if not no_nccl and shares and not all(one.shares for one in every):
            no_nccl = (
                "several ranks use one GPU, which NCCL does from 2.30 on and with NCCL_MULTI_RANK_GPU_ENABLE=1 only; "
                "start fewer ranks, or use 'cuda-ipc'"
            )
        if no_ipc:
            if memory is not None:
                memory.forget()
            exchange(None)  # nobody has mapped anything any more
            if memory is not None:
                memory.close()
        else:
            self.executor.memory = memory
        if (
            not no_nccl
            and self.config.device_transport in ("auto", "nccl")
            and (not shares or no_ipc or len(group.hosts) > 1)
        ):
            # The planner is going to choose it: better to find out now whether it works, while there is another way.
            try:
                self.communicator()
            except ConnectError as error:
                no_nccl = bare(rank, error)
        facts = DeviceFacts(no_ipc, no_nccl, shares)
        self.planner = DevicePlanner(context.planner.placement, facts, self.config.device_transport)
        if group.messages is not None and len(group.hosts) > 1:
            self._staged = StagedMessages(device, group.messages, self.wait)
            self._staging.append(self._staged)
        # Ranks that share a GPU take turns; what a graph holds back from the scheduler could make one wait for another
        # for ever.
        self.executor.graphs = self.config.cuda_graphs and not shares
        self._say(facts, every)
        self.connected = True

    def _say(self, facts: DeviceFacts, every: list[_Introduction]) -> None:
        """What a user should know, once, on one rank."""
        if self.context.rank or self._turn.told:
            return
        self._turn.told = True
        how = ", ".join(f"{name} ({why or 'yes'})" for name, why in (("CUDA IPC", facts.ipc), ("NCCL", facts.nccl)))
        logger.info("GPU tensors: %d ranks on %d GPUs; %s", len(every), len({one.identity for one in every}), how)
        if facts.shares_gpus:
            gpus = len({one.identity for one in every})
            logger.warning(
                "%d ranks share %d GPU%s: they take turns on it, by CUDA IPC", len(every), gpus, "s" * (gpus > 1)
            )
        if facts.ipc and len(self.context.group.local) > 1:
            detour = "through NCCL" if not facts.nccl else "through host memory, which is slower"
            logger.warning("CUDA IPC cannot be used (%s): GPU tensors go %s", facts.ipc, detour)
        if self._refusal is not None:
            detour = "through host memory" if facts.ipc else "by CUDA IPC"
            logger.warning("%s; GPU tensors go %s", bare(self.context.rank, self._refusal), detour)

    def communicator(self) -> Communicator:
        """NCCL's communicator of these ranks; connected at the first call, which all ranks make in the same operation.

        Raises:
            ConnectError: it cannot connect them: all ranks are told the same, now and later.
        """
        if self._communicator is not None:
            return self._communicator
        if self._refusal is not None:
            raise self._refusal
        library, rank, size, timeout = (
            nccl.library(),
            self.context.rank,
            self.context.size,
            min(_CONNECT_WITHIN, self.config.timeout),
        )
        connect = partial(library.connect, sharers=self._sharers)
        made: list[Communicator] = []
        # Allocated before any rank's kernel can wait for this rank: see `carrier.Memory`.
        scratch = self.memory.get("greetings", 2 * size)
        self.wait()
        try:
            unique = self.context.control.exchange(self._together(lambda: library.make_id() if rank == 0 else b""))[0]
            self._together(lambda: made.append(connect(rank, size, unique, timeout, self.device)))
            self._together(lambda: nccl.warm_up(made[0], self.device, scratch, self.executor.main, timeout))
        except ConnectError as error:
            self._refusal = error
            for communicator in made:
                communicator.abort()
            raise
        self._communicator = made[0]
        self._communicators += made
        return made[0]

    def _together(self, step: Callable[[], Any]) -> Any:
        """Take a step towards NCCL that may fail on one rank alone: then it fails on all, at once, and for the same
        reason."""
        result, problem = None, ""
        try:
            result = step()
        except CollectivesError as error:
            problem = str(error)
        problem = next(filter(None, self.context.control.exchange(problem)), "")
        if problem:
            raise ConnectError(
                f"rank {self.context.rank}: NCCL cannot connect these ranks: {bare(self.context.rank, problem)}"
            )
        return result

    def use_messages(self, transport: str) -> None:
        """Messages between devices go through NCCL, or through host memory, from now on."""
        self.executor.messages = NcclMessages(self.communicator()) if transport == "nccl" else self._staged

    @property
    def failure(self) -> Exception | None:
        """Why work that was under way has been aborted."""
        return self._watch.failure

    def release(self) -> int:
        """Give back the tensors of operations that are done, and the peers' memory; the bytes of the latter that are
        mapped no more."""
        if self._device is None:
            return 0
        with self.active():
            self.wait()
            self.keeper.release()
            return 0 if self.executor.memory is None else self.executor.memory.release()

    def trim(self) -> int:
        """Give back what was outgrown or retired, when all peers have given it back; the bytes of the former."""
        if self._device is None:
            return 0
        with self.active():
            self.wait()
            self.tidy()
            return self.memory.trim()

    def close(self) -> None:
        """Stop using the device and the peers' memory; the device is done."""
        if self._device is None:
            return
        with self.active():
            self.keeper.release()  # from here on every completion knows that it has passed, and asks no event again
            self._watch.close()
            _unsettled[:] = [staging for staging in _unsettled if staging is not self._staging]
            self.executor.release_graphs()
            if self._communicator is not None:
                self._communicator.close()
            if self.executor.memory is not None:
                self.executor.memory.forget()

    def free(self) -> None:
        """Give everything back, when no peer uses this rank's memory or events any more."""
        if self._device is None:
            return
        with self.active():
            for packing in self._packings:
                packing.close()
            self._packings.clear()
            if self._staged is not None:
                self._staged.close()
            if self.executor.memory is not None:
                self.executor.memory.close()
            self.executor.close()
            self.events.close()
            self.memory.close()


def _first(every: list[_Introduction], what: str) -> str:
    return next((of_rank(rank, said) for rank, one in enumerate(every) if (said := getattr(one, what))), "")


_TURN = 0x7475726E
"""The token of a meeting in which a rank has taken its turn."""
