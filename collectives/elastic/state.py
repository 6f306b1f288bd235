"""A state: what training changes, saved by `commit`, and alike on all ranks after `sync`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from enum import IntFlag
from typing import Any

import numpy as np

from collectives import api
from collectives.base.reduce_op import Op
from collectives.elastic import retry
from collectives.worlds import generations, runtime
from collectives.worlds.world import World

_UPDATES = "elastic: host updates"


class HostsUpdatedInterrupt(RuntimeError):
    """Raised in the training function when ranks are to be added or removed, or when some have died and steps were
    retried without them: `run` goes on with those that there are.

    Attributes:
        skip_sync: ranks are only removed, so that nobody needs the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts updated")
        self.skip_sync = skip_sync


class HostUpdateResult(IntFlag):
    """What a notice says of the hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class _HostMessages(queue.SimpleQueue[tuple[int, HostUpdateResult]]):
    """The notices of this generation: number and update. No interrupt leaves it locked, as it may leave a Queue."""

    _newest = 0

    def empty(self) -> bool:
        """Whether there is none; looks for new ones."""
        number, said = generations.notices()
        if said and number > self._newest:
            self._newest = number
            self.put((number, HostUpdateResult(said)))
        return super().empty()


class State:
    """The base of states. Others derive `save`, `restore` and `sync`, and `reset` where they need it.

    Args:
        bcast_object, get_rank: part of Horovod's interface: functions for subclasses to use, by default
            `collectives.broadcast_object` and `collectives.rank`.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or api.broadcast_object
        self._rank = get_rank or runtime.rank
        self._host_messages = _HostMessages()
        self._last_updated_timestamp = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = self._version = 0
        self._word = np.zeros(4, np.int64)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Call functions, in their order, whenever the ranks have changed and before the state is synchronized.

        They may call collectives: all ranks call them, newcomers included.

        Example:
            state.register_reset_callbacks([lambda: set_learning_rate(0.01 * hvd.size())])
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` when the ranks have changed: forgets notices, and calls `reset` and the callbacks."""
        self._host_messages = _HostMessages()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: int, update_res: HostUpdateResult) -> None:
        """Note an update of the hosts, of which all ranks learn in the next `check_host_updates`.

        Args:
            timestamp: newer than those before, else it is ignored.
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and check for updates of the hosts. After a failure the ranks return to the saved state.

        Every rank calls it, at the same points of the training. It costs one copy of the state in host memory, and an
        all-reduce of 32 bytes.

        Raises:
            HostsUpdatedInterrupt: on all ranks, or on none.
            RecoverableError: another rank has failed. The state is saved.
        """
        self.save()
        self._commits += 1
        self._version += 1
        with runtime.world().refusing(_UPDATES):  # not where this rank ends, as by an interrupt: the others go on then
            self._write_file()
        generations.committed()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check for updates of the hosts without saving; every rank calls it.

        Raises:
            HostsUpdatedInterrupt: on all ranks, or on none: any rank's notice counts.
        """
        self.settle()
        newest, said = self._last_updated_timestamp, HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > self._last_updated_timestamp:
                newest, said = max(newest, timestamp), said | update
        word, flags = self._word, (HostUpdateResult.removed, HostUpdateResult.added)
        own = (newest, newest > self._last_updated_timestamp, *(flag in said for flag in flags))

        def agree(world: World) -> None:
            word[:] = own
            world.allreduce_(word, op=Op.MAX, name=_UPDATES)

        steps = retry.steps()
        if steps is None:
            agree(runtime.world())
        elif not steps.carry_out(_UPDATES, agree, votes=False):
            return  # others have learnt of no update, and go on
        newest, updated, removed, added = word.tolist()
        self._last_updated_timestamp = newest
        if updated:
            raise HostsUpdatedInterrupt(bool(removed and not added))
        if steps is not None and steps.retried:  # on all ranks: each of this generation has taken part in the retry
            steps.renewed = True
            raise HostsUpdatedInterrupt(skip_sync=True)

    def save(self) -> None:
        """Copy the state to host memory."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait for what the program has begun, of which other ranks may need this one's part. Does nothing here."""

    def restore(self) -> None:
        """Return to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state alike on all ranks, which all call it."""
        raise NotImplementedError

    def _write_file(self) -> None:
        """Write what was saved to a file, where the program has asked for one."""

    def reset(self) -> None:
        """Renew what depends on the ranks; called before the callbacks. Does nothing here."""
