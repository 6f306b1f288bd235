"""Groups whose members change: torchft's ``configure``, and c10d's reconfiguration.

Each change ends the group's world here, at once, and connects the new members anew (`collectives.worlds.connections`):
a connection is a generation, and nothing that belongs to an earlier one reaches it.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.base.config import Config
from collectives.base.errors import (
    CollectivesError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    NotInitializedError,
    OperationError,
)
from collectives.c10d.work import Work
from collectives.transport.tcp import network
from collectives.worlds.connections import Connection
from collectives.worlds.world import World

_c10d: Any = torch._C._distributed_c10d
_SCHEME = "collectives"


def _outward() -> str:
    """An address of this host at which others may reach it; loopback where there is no other."""
    every = [address for of_one in network.addresses().values() for address in of_one]
    return next((address for address in every if not network.is_loopback(address)), network.LOOPBACK)


class Membership:
    """The connection of a process group."""

    world: World | None = None
    _connection: Connection | None = None
    _meeting: Any = None
    """The store that this process serves, for groups of which it is the first member."""
    _handle = ""
    _used: frozenset[int] = frozenset()
    """The numbers of the reconfigurations that this process has taken part in."""
    _rank = 0
    _size = 1
    _timeout: timedelta

    def _config(self) -> Config:
        raise NotImplementedError

    def _connect(self, store: Any, rank: int, size: int, how: str, numbers: Sequence[int] | None = None) -> None:
        self._connection = Connection(store, rank, size, self._config(), how, numbers)
        self.world, self._rank, self._size = self._connection.world, rank, size

    def _disconnect(self) -> None:
        """Leave the members. Never waits for them, and never raises."""
        world, self.world, self._connection = self.world, None, None
        if world is not None:
            with suppress(CollectivesError):
                world.shutdown()

    def errored(self) -> Exception | None:
        """Why the group can no longer be used; None while it can."""
        if self.world is None:
            return NotInitializedError(
                "this process group is not connected: it was destroyed, or has no members yet [W1]"
            )
        return self.world.failure

    def get_error(self) -> Any:
        """`errored` in c10d's words: an ``ErrorType``."""
        error = self.errored()
        if error is None or isinstance(error, NotInitializedError):
            return _c10d.ErrorType.SUCCESS
        return _c10d.ErrorType.TIMEOUT if isinstance(error, CollectiveTimeoutError) else _c10d.ErrorType.COMM_ERROR

    # ---- torchft

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leave the present members, and connect those who call this with the same ``store_addr``.

        Args:
            store_addr: ``host:port/prefix`` of a ``TCPStore``; the prefix is used this once.
            replica_id: of this process; for messages.
            rank, world_size: of this process among the new members.
            quorum_id, group_rank, group_world_size, global_ranks: torchft's; without effect.

        Raises: as the making of a `Connection`. The group has no members then.
        """
        self._disconnect()
        address, _, prefix = store_addr.partition("/")
        host, _, port = address.rpartition(":")
        store = _c10d.PrefixStore(prefix, self._client(host.strip("[]"), int(port)))
        self._connect(store, rank, world_size, f"{store_addr}, replica {replica_id}")

    def register(self, name: str) -> Any:
        """Make this group known to torch, for device meshes and functional collectives; as a group of one rank, because
        its size may change. Returns it.

        Args:
            name: a name that no other group has.
        """
        backend = f"collectives:{name}"
        dist.Backend.register_backend(backend, lambda *_: self, devices=["cpu", "cuda"])
        return dist.new_group([dist.get_rank()], backend=backend, group_desc=backend)

    def unregister(self) -> None:
        """End what `register` has begun, and the group."""
        dist.destroy_process_group(self)  # type: ignore[arg-type]  # the subclass is one

    def _client(self, host: str, port: int) -> Any:
        return _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=self._timeout)

    # ---- c10d's reconfiguration

    def get_reconfigure_handle(self) -> str:
        """Where this process can be met: what the others name it by in `reconfigure`."""
        if not self._handle:
            interface = self._config().network_interface
            host = network.address_of(interface) if interface else _outward()
            self._meeting = _c10d.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            self._handle = f"{_SCHEME}:{platform.node()}:{secrets.token_hex(8)}:{self._meeting.port}:{host}"
        return self._handle

    def reconfigure(self, opts: Any) -> Work:
        """Leave the present members, and connect those with the given handles.

        Args:
            opts: has ``uuid``, a number that is used once; ``handles``, of all new members, this process included: a
                list gives their ranks, of a set they are the sorted order; and ``timeout``.

        Raises:
            InvalidArgumentError: this process is not among the handles. OperationError: the number was used already.
                The group stays as it is.
            And as the making of a `Connection`. The group has no members then, and may be reconfigured again.
        """
        own = self.get_reconfigure_handle()
        handles = list(opts.handles) if isinstance(opts.handles, (list, tuple)) else sorted(opts.handles)
        if opts.uuid in self._used:
            raise OperationError(f"reconfigure: uuid {opts.uuid} was already used; pass a new one on all ranks [F99]")
        if own not in handles or len(set(handles)) != len(handles):
            raise InvalidArgumentError(
                f"reconfigure: handles: expected unique handles that include this process's {own}, got {handles} [F100]"
            )
        scheme, _, _, port, host = [*handles[0].split(":", 4), "", "", "", ""][:5]
        if scheme != _SCHEME or not port.isdecimal():
            raise InvalidArgumentError(
                f"reconfigure: handles: expected {_SCHEME}:host:nonce:port:address, got {handles[0]!r} [F101]"
            )
        self._used |= {opts.uuid}
        if opts.timeout is not None and opts.timeout.days >= 0:
            self._timeout = opts.timeout
        self._disconnect()
        client = self._meeting if own == handles[0] else self._client(host, int(port))
        store = _c10d.PrefixStore(f"reconfigure/{opts.uuid}", client)
        self._connect(store, handles.index(own), len(handles), f"reconfiguration {opts.uuid}")
        return Work([])
