"""Groups of processes connected through MPI.

No thread of the program blocks inside MPI: requests are posted and tested, so that a wait detects a failed rank, keeps
its bound, and yields the core. Calls that make communicators exist in a blocking form only and run in a separate thread
(`collectives.transport.mpi.bounded_mpi`). A group's communicator is a duplicate of the caller's: the program's own MPI
traffic is not affected, and finalizing MPI is left to the code that initialized it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from collectives.base.config import Config
from collectives.base.errors import InvalidTypeError, TransportError
from collectives.transport.assembly import Wiring, make_group
from collectives.transport.group import Group
from collectives.transport.mpi.bounded_mpi import Waiter, barrier_then, forget
from collectives.transport.mpi.channel import Channel, MpiWords
from collectives.transport.mpi.mpi_endpoint import MpiEndpoint
from collectives.transport.mpi.mpi_messages import MpiMessages
from collectives.transport.tcp import network

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives.transport.mpi.mpi_heart import MpiHeart
    from collectives.transport.tcp.tcp_groups import TcpWiring


def connect(comm: MPI.Intracomm | Sequence[int], config: Config) -> Group:
    """Make the group of a communicator, or of some ranks of COMM_WORLD; collective over them.

    A rank that raises, for whatever reason, leaves no other rank waiting: the ranks that wait for it raise
    RankFailedError. All of them may call again.

    Args:
        comm: the communicator, which is duplicated; or the ranks.

    Raises:
        TransportError: MPI may not be called from several threads.
        MismatchError, RankFailedError, CollectiveTimeoutError: as `make_group`.
    """
    from mpi4py import MPI

    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED"}
        raise TransportError(
            f"MPI was started with MPI_THREAD_{names.get(level, level)}, but the engine and the program call it from "
            "several threads, which needs MPI_THREAD_MULTIPLE; do not change mpi4py.rc.thread_level, or ask "
            "Init_thread for MPI_THREAD_MULTIPLE [S49]"
        )
    every_process = MPI.COMM_WORLD
    waiter = Waiter(every_process.Get_rank(), config.timeout)
    # Blocking calls run apart from this thread, so that an exception here does not leave the other ranks inside them.
    if isinstance(comm, Sequence):
        ranks, key = list(comm), ("some", *comm)
        own = waiter.call(
            lambda: every_process.Create_group(every_process.Get_group().Incl(ranks)),
            f"the ranks {ranks} to call init()",
            key,
        )
    elif not hasattr(comm, "Get_rank") or comm.Is_inter():
        raise InvalidTypeError(f"comm={comm!r}: expected an mpi4py intracommunicator [S4]")
    else:
        key = ("all", comm.handle)
        own = waiter.call(lambda: barrier_then(comm.Ibarrier, comm.Dup), "every rank to call init()", key)
    wiring = MpiWiring(Channel(own, config.timeout, range(own.Get_size())), config.timeout)
    # Until then the next attempt continues with this communicator.
    return make_group(wiring, config, wiring.channel.names, begun=partial(forget, key))


class MpiWiring:
    """`assembly.Wiring` through a communicator, which the channel owns.

    Args:
        group: the name of a part of another group, for its notices; empty for the outermost group.
        watched: the heart of the outermost group, which a part of it uses.
    """

    def __init__(self, channel: Channel, timeout: float, group: str = "", watched: MpiHeart | None = None) -> None:
        self.channel, self._timeout, self._group, self._watched = channel, timeout, group, watched
        self._parts = itertools.count()
        self.messages = MpiMessages(channel)
        self.key: bytes | None = None

    def endpoint(self) -> MpiEndpoint:
        return MpiEndpoint(self.channel)

    def words(self) -> MpiWords:
        return MpiWords(self.channel)

    def identities(self) -> list[str]:
        # Told by the ranks themselves: MPI finds them by making a communicator, for which a rank that is interrupted
        # leaves a thread of each rank waiting.
        return self.channel.exchange(network.identity())

    def settled(self, hosts: tuple[tuple[int, ...], ...], config: Config) -> Wiring:
        by_tcp = config.transport == "tcp" or (len(hosts) > 1 and config.network == "tcp")
        if self._watched is not None:
            self.channel.hear(self._watched.heart.notices(self._group, self.channel.names))
        elif not self._group and (len(hosts) > 1 or by_tcp):
            from collectives.transport.mpi import mpi_heart  # with asyncio, which ranks of one host do not need

            self._watched = watched = mpi_heart.watch(self.channel, config, needed=by_tcp)
            if watched is not None:
                self.channel.hear(watched.notices)
                if by_tcp:
                    return self._replaced(watched, config)
                if config.network == "auto" and config.transport != "mpi" and config.algorithm != "native":
                    return self._quicker(watched, config)
        return self

    def _quicker(self, watched: MpiHeart, config: Config) -> Wiring:
        from collectives.transport.mpi.network_choice import choose

        tcp = self._replaced(watched, config)
        chosen: Wiring = self
        try:
            chosen = choose(self, tcp)
        finally:
            if chosen is not tcp:
                tcp.disconnect()
        return chosen

    def _replaced(self, watched: MpiHeart, config: Config) -> TcpWiring:
        """A wiring by TCP, for which MPI was the place to meet."""
        from collectives.transport.tcp.tcp_groups import TcpWiring

        def end(quiet: bool) -> None:
            watched.close()
            if quiet:
                self.channel.close()

        ranks = range(self.channel.size)
        return TcpWiring(watched.mesh, watched.heart, watched.notices.group, ranks, config, end)

    def watch(self, check: Callable[[], object]) -> None:
        self.channel.waiter.check = check

    def split(self, members: Sequence[int]) -> MpiWiring | None:
        from mpi4py import MPI

        channel = self.channel
        own, rank = channel.comm, channel.rank
        group = f"{self._group or 0}.{next(self._parts)}"  # alike on all ranks, which divide the group together
        color = 0 if rank in members else MPI.UNDEFINED
        part = channel.waiter.call(
            lambda: barrier_then(own.Ibarrier, lambda: own.Split(color, rank), self._timeout),
            "every rank to divide the group",
        )
        if rank not in members:
            return None
        names = [channel.names[member] for member in members]
        return MpiWiring(Channel(part, self._timeout, names), self._timeout, group, self._watched)

    def close(self, quiet: bool) -> None:
        if self.channel.notices is not None:
            self.channel.notices.close()
        if self._watched is not None and not self._group:
            self._watched.close()
        if quiet:
            self.channel.close()
