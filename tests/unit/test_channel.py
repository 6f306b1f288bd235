"""Who owns a communicator of MPI: it is freed only when nothing is pending on it. A stand-in for MPI is enough."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.base.errors import CollectiveTimeoutError, RankFailedError
from collectives.transport.mpi.channel import Channel, MpiWords
from collectives.transport.mpi.mpi_messages import MpiMessages
from collectives.transport.tcp.notices import Notice


class Interrupt(KeyboardInterrupt):
    pass


class MpiError(Exception):
    pass


class Request:
    """Completes when it is told to."""

    def __init__(self, done: bool = False) -> None:
        self.done = done

    def Test(self) -> bool:
        return self.done


class Comm:
    """A communicator of two ranks, on which collectives stay pending, or are interrupted as they are posted."""

    def __init__(self) -> None:
        self.posted: list[Request] = []
        self.interrupts = self.freed = self.left_over = False

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Improbe(self, *_: Any) -> None:
        return None

    def Iprobe(self, *_: Any) -> bool:
        return self.left_over

    def post(self, *_: Any) -> Request:
        self.posted.append(Request())
        if self.interrupts:
            raise Interrupt
        return self.posted[-1]

    Iallgather = Irecv = Isend = post

    def Free(self) -> None:
        assert all(request.done for request in self.posted), "MPI would go on with it"
        self.freed = True


@pytest.fixture
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    mpi = SimpleNamespace(Status=object, ANY_SOURCE=-1, ANY_TAG=-1, BYTE=None, Exception=MpiError)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    return Comm()


def channel_of(comm: Any) -> Channel:
    return Channel(comm, 0.05, range(2))


def freed(channel: Channel, comm: Comm) -> bool:
    channel.close()
    return comm.freed


def test_an_idle_communicator_is_freed(comm: Comm) -> None:
    channel = channel_of(comm)
    MpiMessages(channel), MpiWords(channel)
    assert freed(channel, comm)


@pytest.mark.parametrize("as_it_is_posted", [False, True])
def test_not_while_an_exchange_is_pending_that_was_left(comm: Comm, as_it_is_posted: bool) -> None:
    channel = channel_of(comm)
    comm.interrupts = as_it_is_posted
    with pytest.raises(Interrupt if as_it_is_posted else CollectiveTimeoutError):
        channel.exchange("settings")
    assert not freed(channel, comm)
    if not as_it_is_posted:  # otherwise nobody has the request, and nobody can know
        comm.posted[-1].done = True
        assert freed(channel, comm)


def test_the_memory_of_an_exchange_that_was_left_stays_when_another_follows(comm: Comm) -> None:
    channel = channel_of(comm)
    assert channel.in_step
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError):
            channel.exchange("settings")
        assert not channel.in_step
    assert len(channel._collectives) == 2
    comm.posted[-1].done = True
    assert not freed(channel, comm)


@pytest.mark.parametrize("as_it_is_posted", [False, True])
def test_not_while_a_round_is_pending(comm: Comm, as_it_is_posted: bool) -> None:
    channel = channel_of(comm)
    words = MpiWords(channel)
    comm.interrupts = as_it_is_posted
    try:
        words.post(7, ())
    except Interrupt:
        assert as_it_is_posted
    assert not freed(channel, comm)


def test_not_while_a_block_is_pending(comm: Comm) -> None:
    channel = channel_of(comm)
    messages = MpiMessages(channel)
    comm.interrupts = True
    with pytest.raises(Interrupt):
        messages.post_receive(1, np.zeros(3))
    assert messages.busy and not freed(channel, comm)


def test_not_while_a_notice_is_pending_or_has_not_been_read(comm: Comm) -> None:
    channel = channel_of(comm)
    channel.tell(Notice.FAILED, "the disk is full")
    assert not freed(channel, comm)
    comm.posted[-1].done = comm.left_over = True
    assert not freed(channel, comm)
    comm.left_over = False
    assert freed(channel, comm)


def test_not_while_an_abandoned_thread_uses_it(comm: Comm) -> None:
    channel, gate = channel_of(comm), threading.Event()

    def failed() -> None:
        raise RankFailedError("rank 1 has failed")

    channel.waiter.check = failed
    with pytest.raises(RankFailedError):
        channel.waiter.call(lambda: gate.wait(20), "every rank to divide the group")
    assert not freed(channel, comm)
    gate.set()
    channel.waiter.check = lambda: None
    assert channel.waiter.call(lambda: 3, "every rank to divide the group") == 3
    assert not freed(channel, comm), "what the abandoned call has made is nobody's"
