"""MPI: the rendezvous of all ranks, the control plane across hosts, and messages between any two ranks.

No thread of the program blocks inside MPI: requests are posted and tested, with a pause that grows, so that a wait can
see a failed rank, keep its bound, and leave the core to others; the calls that make communicators have no such form and
run in a thread of their own (`collectives.transport.bounded_mpi`). Freeing a communicator talks to nobody. The
communicator is a duplicate of the caller's: the program's own MPI traffic is never touched, and MPI itself is finalised
by whoever initialised it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collectives.base import dtypes
from collectives.base.config import Config
from collectives.base.errors import InvalidTypeError, MismatchError, RankFailedError, TransportError
from collectives.base.reduce_op import Op
from collectives.transport import backoff, shared_memory
from collectives.transport.base import Array
from collectives.transport.board import CALL_MASK, FAILED, LEFT, Board
from collectives.transport.bounded_mpi import Patience, barrier_then, forget
from collectives.transport.channel import BLOCK_TAG, FAILURE_TAG, HERE_TAG, Channel
from collectives.transport.group import BoardControl, Group
from collectives.transport.shared_memory import SharedMemory

if TYPE_CHECKING:
    from mpi4py import MPI

_SAY_HERE_AFTER = 0.4
"""Seconds after which a rank that waits in a call says so to the others, who then know who is missing."""
_RECORD = 3
_MPI_NAMES = {Op.SUM: "SUM", Op.PRODUCT: "PROD", Op.MIN: "MIN", Op.MAX: "MAX"}
_AFTER_EVERY_CALL = 1 << 62


def connect(comm: MPI.Intracomm | Sequence[int], config: Config) -> Group:
    """Make the group of a communicator, or of some ranks of COMM_WORLD; collective over it.

    A rank that raises, whatever it is, leaves no other rank waiting: those that have come that far raise
    RankFailedError. It may call again, and so may they.

    Args:
        comm: is duplicated; or the ranks.
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
            f"several threads: "
            f"MPI_THREAD_MULTIPLE is needed; leave mpi4py.rc.thread_level as it is, or ask for it in Init_thread"
        )
    everybody = MPI.COMM_WORLD
    patience = Patience(everybody.Get_rank(), config.timeout)
    # Calls that have no form to post and test run apart from this thread: an exception here does not leave the others
    # in them.
    if isinstance(comm, Sequence):
        ranks, key = list(comm), ("some", *comm)
        own = patience.call(
            lambda: everybody.Create_group(everybody.Get_group().Incl(ranks)), f"the ranks {ranks} to call init()", key
        )
    elif not hasattr(comm, "Get_rank") or comm.Is_inter():
        raise InvalidTypeError(f"comm={comm!r}: expected an mpi4py intracommunicator")
    else:
        key = ("all", comm.handle)
        own = patience.call(lambda: barrier_then(comm.Ibarrier, comm.Dup), "every rank to call init()", key)
    return _make_group(own, config, range(own.Get_size()), lambda: None, key)


def _make_group(
    own: MPI.Intracomm, config: Config, numbers: Sequence[int], check: Callable[[], None], key: Hashable = None
) -> Group:
    """Make the group of a communicator that belongs to it.

    Args:
        numbers: what messages call its ranks.
        check: raises if a rank has failed that has not come so far.
        key: of the call that made the communicator.
    """
    memory: SharedMemory | None = None
    channel = Channel(own, config.timeout, numbers)

    def check_all() -> None:
        check()
        channel.look_for_failures()

    try:
        forget(
            key
        )  # from here on the others hear of an exception; before, the next attempt goes on with this communicator
        channel.patience.check = check_all
        configs = channel.exchange(config)
        _compare_settings(numbers[channel.rank], configs)
        config = config.with_those_of(configs[0])
        hosts = _hosts(channel, config.local_size)
        local = next(host for host in hosts if channel.rank in host)
        if channel.size > 1 and config.transport != "mpi":
            memory = shared_memory.connect(channel.rank, channel.size, local, channel.exchange, timeout=config.timeout)
        channel.exchange(None)  # whoever fails before this is heard of on the channel; after it, on the board
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
    """Put together what every rank has by now; nothing here waits."""
    from mpi4py import MPI

    own, patience, rank = channel.comm, channel.patience, channel.rank
    control: BoardControl | MpiControl

    def exchange(value: Any) -> list[Any]:
        try:
            return channel.exchange(value)
        except BaseException as error:
            # Whatever it was, the others must not wait for the rest of the exchange.
            control.fail(f"{type(error).__name__}: {error}")
            raise

    if memory is not None:
        memory.board.names = numbers
    if memory is not None and len(hosts) == 1:
        control = BoardControl(memory.board, exchange)
        patience.check = memory.board.check
    else:
        control = MpiControl(channel, exchange, memory.board if memory is not None else None)
        patience.check = partial(control.check, deep=True)
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
            part = patience.call(
                lambda: barrier_then(own.Ibarrier, lambda: own.Split(color, rank)), "every rank to divide the group"
            )
            return (
                _make_group(part, config, [numbers[member] for member in chosen], patience.check)
                if rank in chosen
                else None
            )
        except BaseException as error:
            control.fail(f"{type(error).__name__}: {error}")
            raise

    messages = MpiMessages(own, patience) if channel.size > 1 else None
    return Group(rank, channel.size, hosts, control, memory, messages, split, numbers, close, config)


class MpiMessages:
    """`base.MessageTransport` over MPI's point-to-point messages."""

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, patience: Patience) -> None:
        self._comm = comm
        self._patience = patience
        self._requests: list[MPI.Request] = []

    def post_receive(self, peer: int, into: Array) -> None:
        self._requests.append(self._comm.Irecv(into.view(np.uint8), peer, BLOCK_TAG))

    def post_send(self, peer: int, block: Array) -> None:
        self._requests.append(self._comm.Isend(block.view(np.uint8), peer, BLOCK_TAG))

    def drain(self) -> None:
        if self._requests:
            self._patience.wait_all(self._requests, "a block from or to another rank")
            self._requests.clear()

    def close(self) -> None:
        self._requests.clear()

    @property
    def busy(self) -> bool:
        """Whether MPI may still read or write what was posted."""
        return bool(self._requests)

    def knows(self, op: Op, dtype: np.dtype[Any]) -> bool:
        """Whether MPI itself reduces these numbers as we do.

        It does not know halves; bool has no sum; Open MPI's sums of 8 and 16 bits saturate instead of wrapping (seen
        with 5.0.11 on AVX-512); its Min and Max lose NaN.
        """
        combining = op.combining(dtype)
        if dtypes.is_integer(dtype):
            return dtype.itemsize >= 4 and combining in _MPI_NAMES
        return not (dtypes.is_half(dtype) or dtypes.is_bool(dtype)) and combining in (Op.SUM, Op.PRODUCT)

    def native_allreduce(self, source: Array, out: Array, op: Op) -> None:
        """MPI's own all-reduce, for messages so small that the number of messages is all that counts.

        Args:
            source, out: 1-D, contiguous, equally long, of a dtype that MPI `knows`; may be the same array.
            op: Average is summed; dividing is left to the caller.
        """
        from mpi4py import MPI

        operation = getattr(MPI, _MPI_NAMES[op.combining(source.dtype)])
        send = MPI.IN_PLACE if source is out else source
        self._requests.append(self._comm.Iallreduce(send, out, operation))
        self.drain()


class MpiControl:
    """`base.Control` across hosts: one small allgather per call.

    Failures and departures travel as messages of their own, which every wait looks for; on its own host a rank also
    puts them on the board.
    """

    def __init__(self, channel: Channel, exchange: Callable[[Any], list[Any]], board: Board | None) -> None:
        self.rank = channel.rank
        self.size = channel.size
        self._channel = channel
        self._names = channel.names
        self._comm = channel.comm
        self._patience = channel.patience
        self._exchange = exchange
        self._board = board
        self._call = 0
        self._record = np.zeros(_RECORD, np.int64)
        self._records = np.zeros((self.size, _RECORD), np.int64)
        channel.kept += [self._record, self._records]
        self._words: Array = self._records[:, 1:]
        self._request: MPI.Request | None = None
        self._entry = 0
        self._same = False
        self._entered: Sequence[int] | memoryview = ()
        self._entered_at = 0.0
        self._said_here = 0
        self._has_failed = False

    def enter(self, signature: int, words: Sequence[int] | memoryview = ()) -> None:
        self._call += 1
        self._entry = signature << 16 | (self._call & CALL_MASK)
        self._entered = words
        self._record[0] = self._entry
        short = words[: _RECORD - 1]
        self._record[1 : 1 + len(short)] = short
        self._request = self._comm.Iallgather(self._record, self._records)
        self._entered_at = time.monotonic()

    def look(self, *, spin: bool = True) -> bool | None:
        if self._request is not None:
            if not self._request.Test():
                return None
            self._request = None
            self._same = self._read_records()
        return self._same

    def _read_records(self) -> bool:
        """All records are here: compare them, and fetch the words that do not fit in."""
        records, words = self._records, self._entered
        if not bool((records[:, 0] == self._entry).all()):
            return False
        self._words = records[:, 1 : 1 + min(len(words), _RECORD - 1)]
        if len(words) > _RECORD - 1:
            mine = np.array(words, np.int64)
            everybody = np.empty((self.size, len(mine)), np.int64)
            request = self._comm.Iallgather(mine, everybody)
            self._channel.collective = (request, mine, everybody)
            self._patience.wait(request, "every rank's sizes")
            self._words = everybody
        return True

    def agree(self, signature: int, words: Sequence[int] | memoryview = ()) -> bool:
        self.enter(signature, words)
        assert self._request is not None
        self._patience.wait(self._request, "every rank to enter the call")
        return bool(self.look())

    def called(self) -> bool:
        return True  # who entered a collective operation of MPI shows only to those who enter it too

    def missing(self) -> list[int]:
        if self._said_here != self._call:
            return []
        return [peer for peer in range(self.size) if peer != self.rank and self._channel.here.get(peer, 0) < self._call]

    def relax(self) -> None:
        backoff.yield_core()

    def words_of(self, peer: int) -> Sequence[int]:
        words: list[int] = self._words[peer].tolist()
        return words

    def exchange(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def fail(self, text: str, *, in_call: bool = False) -> None:
        self._has_failed = True
        if self._board is not None:
            self._board.mark(FAILED, text)
        self._channel.tell(FAILURE_TAG, text)

    def leave(self) -> None:
        if self._board is not None:
            self._board.mark(LEFT)
        # Messages of two tags may overtake each other: nobody shall take a rank that has failed for one that left
        # early.
        self._channel.leave(_AFTER_EVERY_CALL if self._has_failed else self._call)

    def acknowledged(self) -> bool:
        channel, board = self._channel, self._board
        channel.read_notices()
        on_board = (
            {peer for peer in board.peers if board.state_of(peer) in (LEFT, FAILED)} if board is not None else set()
        )
        return len(channel.failed.keys() | channel.left.keys() | on_board) == self.size - 1

    def all_left(self) -> bool:
        channel, board = self._channel, self._board
        channel.read_notices()
        on_board = {peer for peer in board.peers if board.is_gone(peer)} if board is not None else set()
        return len(channel.left.keys() | on_board) == self.size - 1

    def check(self, *, deep: bool = False, upcoming: bool = False) -> None:
        """Raise RankFailedError if a rank has failed, or if one has left without entering the call that this rank is
        in."""
        if self._board is not None:
            self._board.check(processes=deep)
        channel = self._channel
        channel.look_for_failures()
        for peer, calls in channel.left.items():
            if calls < self._call + upcoming:
                raise RankFailedError(
                    f"rank {self._names[self.rank]}: rank {self._names[peer]} has shut down or ended while this rank "
                    f"waits for it; "
                    f"every rank must make the same calls before it leaves"
                )
        waits = self._request is not None and self._said_here != self._call
        if deep and waits and time.monotonic() - self._entered_at > _SAY_HERE_AFTER:
            self._said_here = self._call
            channel.tell(HERE_TAG, str(self._call))

    def close(self) -> bool:
        return self._channel.quiet()


def _compare_settings(rank: int, configs: Sequence[Config]) -> None:
    """Settings decide what the planner chooses, so they must be alike; launchers do not always pass the environment
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
    """The ranks of each host, as MPI knows them, or by the given number of ranks on each."""
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
        channel.patience.call(lambda: barrier_then(own.Ibarrier, first_here), "every rank to name its host")
    )
    return tuple(tuple(r for r in range(size) if firsts[r] == f) for f in sorted(set(firsts)))
