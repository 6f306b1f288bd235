"""Groups of processes connected through MPI.

No thread of the program blocks inside MPI: requests are posted and tested, so that a wait detects a failed rank, keeps
its bound, and yields the core. Calls that make communicators exist in a blocking form only and run in a separate thread
(`collectives.transport.bounded_mpi`). A group's communicator is a duplicate of the caller's: the program's own MPI
traffic is not affected, and finalizing MPI is left to the code that initialized it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from collectives.base.config import Config
from collectives.base.errors import InvalidTypeError, MismatchError, TransportError
from collectives.transport import shared_memory
from collectives.transport.board import FAILED
from collectives.transport.board_control import BoardControl
from collectives.transport.bounded_mpi import Waiter, barrier_then, forget
from collectives.transport.channel import FAILURE_TAG, Channel
from collectives.transport.group import Group
from collectives.transport.mpi_messages import MpiMessages
from collectives.transport.mpi_words import MpiWords
from collectives.transport.network_control import NetworkControl
from collectives.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from mpi4py import MPI


def connect(comm: MPI.Intracomm | Sequence[int], config: Config) -> Group:
    """Make the group of a communicator, or of some ranks of COMM_WORLD; collective over them.

    A rank that raises, for whatever reason, leaves no other rank waiting: the ranks that wait for it raise
    RankFailedError. All of them may call again.

    Args:
        comm: the communicator, which is duplicated; or the ranks.
        config: the settings.

    Raises:
        TransportError: MPI may not be called from several threads.
        CollectiveTimeoutError: not every rank came within ``config.timeout``.
        MismatchError: the ranks have different settings.
        RankFailedError: a rank failed meanwhile.
    """
    from mpi4py import MPI

    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise TransportError(
            f"MPI was started with MPI_THREAD_{names.get(level, level)}, but the engine and the program call it from "
            f"several threads: MPI_THREAD_MULTIPLE is needed; leave mpi4py.rc.thread_level as it is, or ask for it in "
            f"Init_thread"
        )
    everybody = MPI.COMM_WORLD
    waiter = Waiter(everybody.Get_rank(), config.timeout)
    # Blocking calls run apart from this thread, so that an exception here does not leave the other ranks inside them.
    if isinstance(comm, Sequence):
        ranks, key = list(comm), ("some", *comm)
        own = waiter.call(
            lambda: everybody.Create_group(everybody.Get_group().Incl(ranks)), f"the ranks {ranks} to call init()", key
        )
    elif not hasattr(comm, "Get_rank") or comm.Is_inter():
        raise InvalidTypeError(f"comm={comm!r}: expected an mpi4py intracommunicator")
    else:
        key = ("all", comm.handle)
        own = waiter.call(lambda: barrier_then(comm.Ibarrier, comm.Dup), "every rank to call init()", key)
    return _make_group(own, config, range(own.Get_size()), lambda: None, key)


def _make_group(
    own: MPI.Intracomm, config: Config, numbers: Sequence[int], check: Callable[[], None], key: Hashable = None
) -> Group:
    """Make a group that owns its communicator.

    Args:
        own: the communicator.
        config: this rank's settings.
        numbers: the ranks' numbers in messages.
        check: raises if a rank has failed before it reached the exchanges of this group.
        key: of the call that made the communicator.
    """
    memory: SharedMemory | None = None
    channel = Channel(own, config.timeout, numbers)

    def check_all() -> None:
        check()
        channel.look_for_failures()

    try:
        # From here on the other ranks are told of an exception; before, the next attempt continues with this
        # communicator.
        forget(key)
        channel.waiter.check = check_all
        configs = channel.exchange(config)
        _compare_settings(numbers[channel.rank], configs)
        config = config.with_those_of(configs[0])
        hosts = _hosts(channel, config.local_size)
        local = next(host for host in hosts if channel.rank in host)
        if channel.size > 1 and config.transport != "mpi":
            memory = shared_memory.connect(channel.rank, channel.size, local, channel.exchange, timeout=config.timeout)
        channel.exchange(None)  # a failure before this is announced on the channel; after it, on the board
        return _assemble(channel, hosts, memory, config, tuple(numbers))
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if memory is not None:
            memory.board.mark(FAILED, text)
        channel.tell(FAILURE_TAG, text)
        raise


def _assemble(
    channel: Channel,
    hosts: tuple[tuple[int, ...], ...],
    memory: SharedMemory | None,
    config: Config,
    numbers: tuple[int, ...],
) -> Group:
    """Assemble the group from its connected parts. Does not wait. Another medium is added here."""
    from mpi4py import MPI

    own, waiter, rank = channel.comm, channel.waiter, channel.rank
    control: BoardControl | NetworkControl

    def exchange(value: Any) -> list[Any]:
        try:
            return channel.exchange(value)
        except BaseException as error:
            # The other ranks must not wait for the rest of the exchange.
            control.fail(f"{type(error).__name__}: {error}")
            raise

    if memory is not None:
        memory.board.names = numbers
    if memory is not None and len(hosts) == 1:
        control = BoardControl(memory.board, exchange)
        waiter.check = memory.board.check
    else:
        control = NetworkControl(channel, MpiWords(channel), exchange, memory.board if memory is not None else None)
        waiter.check = partial(control.check, deep=True)
        if memory is not None:
            memory.board.also_check = channel.look_for_failures

    def close() -> None:
        quiet = control.close()
        if memory is not None:
            memory.close()
        if quiet:
            channel.close()

    def split(members: Sequence[int]) -> Group | None:
        chosen = sorted(members)
        color = 0 if rank in chosen else MPI.UNDEFINED
        try:
            part = waiter.call(
                lambda: barrier_then(own.Ibarrier, lambda: own.Split(color, rank)), "every rank to divide the group"
            )
            return (
                _make_group(part, config, [numbers[member] for member in chosen], waiter.check)
                if rank in chosen
                else None
            )
        except BaseException as error:
            control.fail(f"{type(error).__name__}: {error}")
            raise

    messages = MpiMessages(own, waiter) if channel.size > 1 else None
    return Group(rank, channel.size, hosts, control, memory, messages, split, numbers, close, config)


def _compare_settings(rank: int, configs: Sequence[Config]) -> None:
    """Refuse settings that differ: they decide the planner's choices, and launchers do not always pass the environment
    on."""
    for name, attribute in Config.__dataclass_fields__.items():
        values = [getattr(config, name) for config in configs]
        if attribute.metadata["alike"] and len(set(values)) > 1:
            shown = ", ".join(f"rank {peer}: {value}" for peer, value in enumerate(values))
            raise MismatchError(
                f"rank {rank}: {attribute.metadata['variable']} differs between the ranks ({shown}); "
                f"give all ranks the same environment (collectivesrun does)"
            )


def _hosts(channel: Channel, local_size: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host: as MPI finds them, or ``local_size`` consecutive ranks on each."""
    from mpi4py import MPI

    rank, size, own = channel.rank, channel.size, channel.comm
    if local_size:
        return tuple(tuple(range(first, min(first + local_size, size))) for first in range(0, size, local_size))

    def first_here() -> int:
        shared = own.Split_type(MPI.COMM_TYPE_SHARED, rank)
        first: int = shared.bcast(rank)
        shared.Free()
        return first

    firsts = channel.exchange(
        channel.waiter.call(lambda: barrier_then(own.Ibarrier, first_here), "every rank to name its host")
    )
    return tuple(tuple(r for r in range(size) if firsts[r] == f) for f in sorted(set(firsts)))
