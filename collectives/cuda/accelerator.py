"""The GPU of one world: device, streams, kernels, and the memory and completions of its operations.

It is created with the first device tensor. The transports to the peers' GPUs are `connection.Connection`.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from collectives.base.config import Config
from collectives.base.errors import InvalidArgumentError
from collectives.base.exclusion import exclusive
from collectives.cuda.builder import DevicePlans
from collectives.cuda.completion import Completion, Events
from collectives.cuda.connection import Connection
from collectives.cuda.executor import DeviceExecutor
from collectives.cuda.transfer import DeviceBuffers, Transfer
from collectives.device import selection
from collectives.device.kernels import Kernels
from collectives.device.packing import Packing
from collectives.device.protocol import Array, Device, active
from collectives.engine.context import Context
from collectives.transport import backoff
from collectives.transport.cuda.issue_order import Turn
from collectives.transport.cuda.watchdog import Watch

_SPINS = 200
_NAP = 20e-6
_TURN_TOKEN = 0x7475726E
"""Token of the meeting after each rank has taken its turn."""

_unsettled: list[Any] = []
"""Page-locked memory, and its users, of worlds whose GPU work has not been seen to end; kept so that it is not reused
before."""


class Accelerator:
    """The device side of one world.

    Args:
        local_rank: this rank among those of its host.
        on_failure: called when issued work can never end, because a peer is gone, and has been aborted.
    """

    def __init__(
        self, context: Context, config: Config, local_rank: int, turn: Turn, on_failure: Callable[[Exception], None]
    ) -> None:
        self.context = context
        self.config = config
        self._device: Device | None = None
        self._local_rank = local_rank
        self._turn = turn
        self._on_failure = on_failure
        self._lock = threading.RLock()
        self._pinned: dict[str, Array] = {}
        self._packings: set[Packing] = set()
        self._retired: list[Packing] = []
        self._staging: list[Any] = [self._pinned, self._packings, self._retired]
        self._kept: deque[tuple[Completion, Any]] = deque()
        """The tensors of issued work, until it is done."""
        self._last: Completion | None = None
        self._issuing = False

    @property
    def device(self) -> Device:
        """The GPU of this rank: that of its first device tensor; without one, the GPU that its number selects."""
        assert self._device is not None
        return self._device

    @exclusive
    def use(self, device: Device | None) -> Device:
        """Use this device from now on; None: the one that this rank's number selects.

        Raises:
            InvalidArgumentError: this world already uses another one.
        """
        if self._device is None:
            override = self.config.device if self.config.device >= 0 else None
            self._create(device or selection.provider().device(selection.choose(self._local_rank, override)))
        elif device is not None and device is not self._device:
            raise InvalidArgumentError(
                f"tensor: expected a tensor on GPU {self.device.index}, where this rank's first tensor was, got one "
                f"on GPU {device.index}: a rank uses one GPU; choose it before the first call, with "
                "CUDA_VISIBLE_DEVICES, torch.cuda.set_device or cupy.cuda.Device [G7]"
            )
        return self.device

    def _create(self, device: Device) -> None:
        with active(device):
            context = self.context
            group, control = context.group, context.control
            board = group.memory.board if group.memory is not None else None
            row = max(16, 2 * len(group.local) + 2 * len(group.hosts) + 4)
            self.kernels = Kernels(device)
            self.events = Events(device)
            self.buffers = DeviceBuffers(device, self.wait)
            self.executor = DeviceExecutor(device, context.rank, context.executor.state, board, row)
            self.transfer = Transfer(context.rank, context.size, control, device, self.executor, self.buffers)
            self.plans = DevicePlans(context.planner.placement, self.kernels)
            self.connection = Connection(
                context,
                self.config,
                device,
                self.executor,
                self.buffers,
                2 * row,
                self.wait,
                self._turn,
                self._staging.append,
            )
            self._watch = Watch(
                device,
                self.connection.communicators,
                partial(control.check, deep=True),
                self._on_failure,
                self.executor.abandon_graphs,
            )
            _unsettled.append(self._staging)
            self._device = device

    def active(self) -> active:
        """Context manager in which this rank's device is the calling thread's current one."""
        return active(self.device)

    # ---- order between the caller's stream and the main stream

    def mark(self, stream: int) -> Completion:
        """Completion of all work that was enqueued on the caller's stream so far."""
        return Completion(self.events, stream)

    def follow(self, mark: Completion) -> None:
        """Order all later work of the main stream after ``mark``."""
        mark.before(self.executor.main)

    def complete(self, things: Any) -> Completion:
        """Completion of all work issued so far; ``things`` stay alive until then."""
        completion = self._last = Completion(self.events, self.executor.main)
        self._issuing = False
        self.keep(completion, things)
        self._watch.add(completion.event)
        return completion

    def keep(self, completion: Completion, things: Any) -> None:
        """Keep ``things`` alive until ``completion``."""
        self._drop_done()
        self._kept.append((completion, things))

    def _drop_done(self) -> None:
        while self._kept and self._kept[0][0].passed():
            self._kept.popleft()

    def wait(self, completion: Completion | None = None) -> None:
        """Block until ``completion``; None: until all issued work is done. Other threads may run meanwhile.

        Raises:
            RankFailedError: the work waits for a rank that is gone.
            CollectiveTimeoutError: it was not done in time.
        """
        # The driver's own waits have no bound and do not check the peers.
        backoff.wait(
            (completion or Completion(self.events, self.executor.main)).passed,
            self._check,
            self.config.timeout,
            lambda: (
                f"rank {self.context.rank}: waited {self.config.timeout:g} s for work on the GPU that depends on "
                "another rank; see what the other ranks are doing, or raise COLLECTIVES_TIMEOUT [G29]"
            ),
            yields=_SPINS,
            longest=_NAP,
        )

    def _check(self, deep: bool) -> None:
        if deep:
            if self._watch.failure is not None:
                raise self._watch.failure
            self.context.control.check(deep=True)

    def settle(self, within: float) -> bool:
        """Whether the GPU does all issued work within some seconds."""
        if self._last is None:
            return True
        with self.active():
            return backoff.poll(self._last.passed, within, _NAP)

    @property
    def failure(self) -> Exception | None:
        """Why issued work has been aborted; None if it has not."""
        return self._watch.failure

    def take_turn(self) -> None:
        """Wait until no other world of these ranks has NCCL work under way, and keep them from issuing any until this
        world's is done: see `collectives.transport.cuda.issue_order`. Collective."""
        if not self._turn.needed:
            return
        for rank in range(self.context.size):
            if rank == self.context.rank:
                self._issuing = True  # set before the turn is taken: another world may call `busy` at any moment
                self._turn.take(
                    self.busy, self.context.rank, self.config.timeout, lambda: self.context.control.check(deep=True)
                )
            self.context.meet(_TURN_TOKEN)

    def busy(self) -> bool:
        """Whether work that this world has issued, or is issuing, is incomplete."""
        return self._issuing or (self._last is not None and not self._last.passed())

    # ---- memory

    def pinned(self, name: str, count: int, dtype: np.dtype[Any]) -> Array:
        """Page-locked host memory by name, as ``count`` elements of ``dtype``; reallocated when it must grow."""
        nbytes = count * dtype.itemsize
        buffer = self._pinned.get(name)
        if buffer is None or buffer.nbytes < nbytes:
            self.wait()
            buffer = self._pinned[name] = self.device.pinned(max(1 << 16, 1 << (nbytes - 1).bit_length()))
        return buffer[:nbytes].view(dtype)

    def adopt(self, packing: Packing, user: Any) -> Packing:
        """Have `tidy` release ``packing`` once ``user`` is gone and the GPU is done; at the latest `free` does."""
        self._packings.add(packing)
        # Not at exit: the driver may be gone by then, and releases everything anyway.
        weakref.finalize(user, self._retired.append, packing).atexit = False
        return packing

    def tidy(self) -> None:
        """Release retired packings if the GPU is idle. Called before the ranks meet for an operation: the driver frees
        memory only when the whole device is idle, and none of its kernels may be waiting for this rank."""
        if self._retired and (self._last is None or self._last.passed()):
            while self._retired:
                packing = self._retired.pop()
                packing.close()
                self._packings.discard(packing)

    def release(self) -> int:
        """Drop the tensors of completed operations and unmap the peers' memory. Returns the bytes unmapped."""
        if self._device is None:
            return 0
        with self.active():
            self.wait()
            self._drop_done()
            return 0 if self.executor.memory is None else self.executor.memory.release()

    def trim(self) -> int:
        """Free outgrown buffers and retired packings, after all peers have unmapped them. Returns the bytes of the
        buffers."""
        if self._device is None:
            return 0
        with self.active():
            self.wait()
            self.tidy()
            return self.buffers.trim()

    def close(self) -> None:
        """Stop using the device and the peers' memory; the device is idle."""
        if self._device is None:
            return
        with self.active():
            self._drop_done()  # every completion has passed now and queries its event no more
            self._watch.close()
            _unsettled[:] = [staging for staging in _unsettled if staging is not self._staging]
            self.executor.release_graphs()
            self.connection.close()

    def free(self) -> None:
        """Release everything, which no peer uses any more."""
        if self._device is None:
            return
        with self.active():
            for packing in self._packings:
                packing.close()
            self._packings.clear()
            self.connection.free()
            self.executor.close()
            self.events.close()
            self.buffers.close()
