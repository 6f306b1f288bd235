"""From connected ranks to a group: settings compared, hosts found, memory shared, and the control plane chosen.

What connects the ranks, MPI or TCP, is a `Wiring`; everything else is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from collectives.base.config import Config
from collectives.base.errors import MismatchError
from collectives.transport.base import Control, MessageTransport
from collectives.transport.group import Group
from collectives.transport.host import shared_memory
from collectives.transport.host.board import FAILED
from collectives.transport.host.board_control import BoardControl
from collectives.transport.host.shared_memory import SharedMemory
from collectives.transport.point_to_point import Endpoint, Routes
from collectives.transport.tcp.network_control import ControlChannel, NetworkControl, Words
from collectives.transport.tcp.notices import Notice


class Wiring(Protocol):
    """How the ranks of a group are connected, as one of them sees it."""

    @property
    def channel(self) -> ControlChannel:
        """Exchanges values, and carries notices."""

    @property
    def messages(self) -> MessageTransport:
        """Messages between any two of the ranks."""

    @property
    def key(self) -> bytes | None:
        """As of `Group`; the same on all ranks."""

    def endpoint(self) -> Endpoint:
        """This rank's end of the point-to-point messages between any two of the ranks; called once. Does not wait."""

    def words(self) -> Words:
        """What gathers the words of a round; made for groups that need it, alike on all ranks."""

    def identities(self) -> Sequence[str]:
        """Each rank's host, as `network.identity` has it; called by all ranks of the group."""

    def watch(self, check: Callable[[], object]) -> None:
        """Have ``check`` called during every wait; an exception from it ends the wait."""

    def settled(self, hosts: tuple[tuple[int, ...], ...], config: Config) -> Wiring:
        """Called on all ranks when their settings agree and their hosts are known: this wiring, or one that serves
        these ranks better and owns this one."""

    def split(self, members: Sequence[int]) -> Wiring | None:
        """The wiring of some of the ranks; called by all ranks of the group, None for those that are not members."""

    def close(self, quiet: bool) -> None:
        """Release what this group owns. ``quiet``: no notice remains in flight."""


def make_group(
    wiring: Wiring,
    config: Config,
    numbers: Sequence[int],
    check: Callable[[], object] = lambda: None,
    begun: Callable[[], object] = lambda: None,
    part_of: Group | None = None,
) -> Group:
    """Make a group that owns its wiring, which is closed if that fails; called on all ranks.

    Args:
        numbers: the ranks' numbers in messages.
        check: raises if a rank has failed before it reached the exchanges of this group.
        begun: called when the other ranks are told of an exception, and no sooner.
        part_of: the group that has these ranks and others.

    Raises:
        MismatchError: the ranks have different settings.
        RankFailedError, CollectiveTimeoutError: a rank failed meanwhile, or did not come in time.
    """
    memory: SharedMemory | None = None
    channel = wiring.channel

    def check_all() -> None:
        check()
        channel.look_for_failures()

    try:
        begun()
        wiring.watch(check_all)
        configs = channel.exchange(config)
        _compare_settings(numbers[channel.rank], configs)
        config = config.with_those_of(configs[0])
        host_size = config.local_size  # consecutive ranks; 0: as they are
        identities = [str(rank // host_size) for rank in range(channel.size)] if host_size else wiring.identities()
        hosts = _hosts_of(identities)
        local = next(host for host in hosts if channel.rank in host)
        wiring = wiring.settled(hosts, config)
        wiring.watch(check_all)
        channel = wiring.channel
        if channel.size > 1 and config.transport not in ("mpi", "tcp"):
            memory = shared_memory.connect(
                channel.rank,
                channel.size,
                local,
                channel.exchange,
                timeout=config.timeout,
                part_of=None if part_of is None else part_of.memory,
            )
        words = wiring.words() if memory is None or len(hosts) > 1 else None
        return _assemble(wiring, words, hosts, memory, config, tuple(numbers))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        channel.tell(Notice.FAILED, text)
        if memory is not None:
            memory.board.mark(FAILED, text)  # last: who sees it may close its channel, and finds the notice there
            memory.close()
        wiring.close(quiet=False)
        raise


def _hosts_of(identities: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    ranks: dict[str, list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault(identity, []).append(rank)
    return tuple(tuple(host) for host in ranks.values())


def _assemble(
    wiring: Wiring,
    words: Words | None,
    hosts: tuple[tuple[int, ...], ...],
    memory: SharedMemory | None,
    config: Config,
    numbers: tuple[int, ...],
) -> Group:
    """Assemble the group from its connected parts. Does not wait."""
    channel, rank = wiring.channel, wiring.channel.rank
    control: Control
    watch: Callable[[], object]

    def exchange(value: Any) -> list[Any]:
        try:
            return channel.exchange(value)
        except BaseException as error:
            # The other ranks must not wait for the rest of the exchange.
            control.fail(f"{type(error).__name__}: {error}")
            raise

    if memory is not None:
        memory.board.names = numbers
    if words is None:
        assert memory is not None
        control, watch = BoardControl(memory.board, exchange), memory.board.check
    else:
        control = NetworkControl(channel, words, exchange, memory.board if memory is not None else None)
        watch = partial(control.check, deep=True)
        if memory is not None:
            memory.board.also_check = channel.look_for_failures
    wiring.watch(watch)

    def close() -> None:
        quiet = control.close()
        if memory is not None:
            memory.close()
        wiring.close(quiet)

    def split(members: Sequence[int]) -> Group | None:
        chosen = sorted(members)
        try:
            part = wiring.split(chosen)
            return (
                None
                if part is None
                else make_group(part, config, [numbers[peer] for peer in chosen], watch, part_of=group)
            )
        except BaseException as error:
            control.fail(f"{type(error).__name__}: {error}")
            raise

    messages = wiring.messages if channel.size > 1 else None

    def open_endpoint() -> Endpoint:
        if memory is None:
            return wiring.endpoint()
        if len(hosts) == 1:
            return memory.endpoint()
        local = next(host for host in hosts if rank in host)
        return Routes(memory.endpoint(), wiring.endpoint(), local)

    key = None if words is None else wiring.key
    group = Group(
        rank, channel.size, hosts, control, memory, messages, split, numbers, close, config, open_endpoint, key
    )
    return group


def _compare_settings(rank: int, configs: Sequence[Config]) -> None:
    """Refuse settings that differ: they decide the planner's choices, and launchers may not pass the environment on."""
    if all(config == configs[0] for config in configs):
        return
    for name, attribute in Config.__dataclass_fields__.items():
        values = [getattr(config, name) for config in configs]
        if attribute.metadata["alike"] and len(set(values)) > 1:
            shown = ", ".join(f"rank {peer}: {value}" for peer, value in enumerate(values))
            raise MismatchError(
                f"rank {rank}: {attribute.metadata['variable']} differs between the ranks ({shown}); "
                f"give all ranks the same environment (collectivesrun does) [M18]"
            )
