"""Worlds beside the default one: of ranks that meet at a store, and of some of these.

A connection is a generation: its network has a number that no other one has, without which no connection is accepted,
and its memory is mapped by its members alone. A rank that believes in an earlier one reaches nothing of a later one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from collectives.base import logging
from collectives.base.config import Config
from collectives.transport.cuda.issue_order import Turn
from collectives.transport.stores import job_key
from collectives.transport.stores.rendezvous import Place, exchange_of
from collectives.transport.tcp.tcp_groups import Network
from collectives.transport.threads import thread_groups
from collectives.worlds import exit_hooks
from collectives.worlds.world import World


class Connection:
    """The ranks that meet at a store. Every one of them makes it.

    Args:
        store: of which all ranks have a client: anything with ``set``, ``get`` and ``wait``. No two connections may use
            the same keys of it at a time.
        rank, size: of this process.
        config: the settings.
        how: where the ranks meet; for messages.
        numbers: the ranks' numbers in messages; by default those of the connection.
        key: the job's; by default what the environment says.

    Attributes:
        world: of all ranks.

    Raises:
        CollectiveTimeoutError: not every rank came within ``config.timeout``.
        RankFailedError: a rank failed meanwhile.
        MismatchError: the ranks have different settings.
        TransportError: the store failed, or a rank cannot be reached.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        config: Config,
        how: str,
        numbers: Sequence[int] | None = None,
        key: bytes | None = None,
    ) -> None:
        logging.configure(config.log_level)
        self._network: Network | None = None
        group = thread_groups.connect(1)[0]
        if size > 1:
            key = key or job_key.from_environment(os.environ)
            self._network = _connect(Place(rank, size, store, key, how), config, numbers)
            group = self._network.everyone
            exit_hooks.tell_joined(os.environ.get(exit_hooks.RECORDS))
        turn = Turn()
        turn.needed = True  # parts are made by their members alone, of which other ranks learn nothing
        self.world = World(group, group.config or config, turn=turn)
        logging.place(self.world.ranks[self.world.rank])

    def part(self, name: str, members: Sequence[int], config: Config) -> World:
        """The world of some of the ranks, which alone call this, together; this rank is one of them.

        Args:
            name: alike on the members, and different from that of any other part, also an earlier one.
            members: as ranks of the connection, in the order of the new ranks.

        Raises: as the making of a connection.
        """
        if self._network is None or len(members) == 1:
            return self.world.beside(thread_groups.connect(1)[0], config)
        group = self._network.group(name, members, config)
        try:
            return self.world.beside(group, group.config or config)
        except BaseException as error:
            group.control.fail(f"{type(error).__name__}: {error}")
            raise


def _connect(place: Place, config: Config, numbers: Sequence[int] | None) -> Network:
    exchange = exchange_of(place, config)
    try:
        return Network(exchange, place.rank, place.key, config, exchange.look_for_failures, numbers)
    except BaseException as error:
        exchange.leave(error)
        raise
