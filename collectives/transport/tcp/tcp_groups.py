"""Groups of processes that no MPI connects: they meet through a store, and are connected by TCP."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

from collectives.base.config import Config
from collectives.transport.assembly import make_group
from collectives.transport.group import Group
from collectives.transport.tcp.heart import Heart
from collectives.transport.tcp.mesh import Links, Mesh
from collectives.transport.tcp.notices import OUTERMOST
from collectives.transport.tcp.tcp_channel import SPINS, TcpChannel, TcpWords
from collectives.transport.tcp.tcp_endpoint import TcpEndpoint
from collectives.transport.tcp.tcp_messages import TcpMessages

_FEW_SPINS = 2


def connect(
    exchange: Callable[[Any], list[Any]],
    rank: int,
    key: bytes | None,
    config: Config,
    check: Callable[[], object] = lambda: None,
) -> Group:
    """Make the group of the processes that call ``exchange`` together.

    A rank that raises leaves no other rank waiting: those that wait for it raise RankFailedError.

    Args:
        check: raises if a rank has failed that has not connected yet.

    Raises:
        TransportError: a rank cannot be reached.
        InvalidArgumentError: there is no such network interface.
        MismatchError, RankFailedError, CollectiveTimeoutError: as `make_group`.
    """
    return Network(exchange, rank, key, config, check).everyone


class Network:
    """Processes that are connected by TCP, and the groups of them. Made by all of them, as `connect` says.

    Args:
        numbers: the ranks' numbers in messages; by default those of the network.

    Attributes:
        everyone: the group of all; closing it ends the network.
    """

    def __init__(
        self,
        exchange: Callable[[Any], list[Any]],
        rank: int,
        key: bytes | None,
        config: Config,
        check: Callable[[], object] = lambda: None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self._mesh = mesh = Mesh(exchange, rank, key, interface=config.network_interface)
        heart, all_ranks = None, range(mesh.size)
        try:
            self._heart = heart = Heart(mesh, config.peer_timeout, config.timeout, check)

            def end(quiet: bool) -> None:
                heart.close()
                mesh.close()

            wiring = TcpWiring(mesh, heart, OUTERMOST, all_ranks, config, end)
            wiring.watch(check)  # the heart does not listen yet: a rank that cannot connect is no rank that has died
            wiring.channel.connect()
            wiring.channel.exchange(None)
            heart.start()
            self.everyone = make_group(wiring, config, numbers or all_ranks)
        except BaseException as error:
            if heart is not None:
                heart.abandon(OUTERMOST, all_ranks, error)
            mesh.close()
            raise

    def group(self, name: str, members: Sequence[int], config: Config) -> Group:
        """The group of some of the processes, which alone call this, together. Raises as `make_group`.

        Args:
            name: alike on the members, and different from that of any other group, also an earlier one.
            members: as ranks of the network, in the order of the group's.
        """
        numbers = [self.everyone.ranks[member] for member in members]
        wiring = TcpWiring(self._mesh, self._heart, name, members, config)
        return make_group(wiring, config, numbers, part_of=self.everyone)


class TcpWiring:
    """`assembly.Wiring` over TCP.

    Args:
        mesh, heart: of all ranks of the job.
        group, members: as of `Links`.
        end: called with `close`'s argument when the group is closed.
    """

    def __init__(
        self,
        mesh: Mesh,
        heart: Heart,
        group: str,
        members: Sequence[int],
        config: Config,
        end: Callable[[bool], object] = lambda quiet: None,
    ) -> None:
        self._mesh, self._heart, self._group, self._members = mesh, heart, group, tuple(members)
        self._config, self._end = config, end
        self._parts = itertools.count()
        notices = heart.notices(group, members)
        self.links = Links(mesh, group, members, config.timeout, notices.look_for_failures)
        here = sum(mesh.hosts[member] == mesh.hosts[mesh.rank] for member in members)
        spins = SPINS if here <= (os.cpu_count() or 1) else _FEW_SPINS
        self.channel = TcpChannel(self.links, config.timeout, members, notices, spins)
        self.messages = TcpMessages(self.channel, self.links, config.lanes)
        self.key = mesh.key_for(f"objects of {group}")

    def endpoint(self) -> TcpEndpoint:
        return TcpEndpoint(self.links, self._members)

    def words(self) -> TcpWords:
        return TcpWords(self.channel)

    def identities(self) -> list[str]:
        return [self._mesh.hosts[member] for member in self._members]

    def settled(self, hosts: tuple[tuple[int, ...], ...], config: Config) -> TcpWiring:
        return self

    def watch(self, check: Callable[[], object]) -> None:
        self.channel.check = self.links.check = check

    def split(self, members: Sequence[int]) -> TcpWiring | None:
        group = f"{self._group}.{next(self._parts)}"  # alike on all ranks, which divide the group together
        if self.channel.rank not in members:
            return None
        part = [self._members[member] for member in members]
        return TcpWiring(self._mesh, self._heart, group, part, self._config)

    def close(self, quiet: bool) -> None:
        self.messages.close()
        self.channel.close()
        self._end(quiet)

    def disconnect(self) -> None:
        """Close the connections of a wiring that is not used, and leave mesh, heart and notices alone."""
        self.messages.close()
        self.channel.disconnect()
