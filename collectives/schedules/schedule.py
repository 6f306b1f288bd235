"""An algorithm as data: what one rank does in a collective, as rounds of steps over numbered chunks.

There are four steps:

    send                  pass a chunk's value on to a peer
    receive               replace a chunk by a peer's value
    receive-and-reduce    combine a chunk with a peer's value
    copy                  put this rank's own contribution into its own result

The steps of a round happen *at once*: what is sent is the value from before the round, and the receives of the round
take effect after it. What a round combines of one chunk, the own value and those of several peers, it combines by the
fixed tree over the ranks in their order (`schedules.fixed_tree`), whatever the order in which the steps are written.
Their order is that of their numbers, unless a schedule that was proved for other numbers states it.

Every send meets the receive of its peer in the same round: the k-th send from a to b with the k-th receive by b from a,
over the same chunks. A schedule says nothing about bytes, memory or devices. It is written for one segment and repeated
over all of them by the executor, which may overlap the rounds of different segments.

A step also says who moves the bytes where memory is shared: by default the receiver pulls, but with ``push`` the sender
writes into the receiver's memory, while the block that it has just reduced is still in its cache. Transports that pass
messages have both sides act and ignore it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class StepKind(Enum):
    """The four steps; REDUCE is receive-and-reduce."""

    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "receive-and-reduce"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class Step:
    """One step: ``span`` neighbouring chunks from ``chunk`` on, exchanged with ``peer`` (oneself in a COPY)."""

    kind: StepKind
    peer: int
    chunk: int
    span: int = 1
    push: bool = False
    count: int = 1
    """REDUCE: the number of ranks whose contributions are in the peer's value, as a mean of values has to know."""

    def __str__(self) -> str:
        chunks = f"chunk {self.chunk}" if self.span == 1 else f"chunks {self.chunk} to {self.chunk + self.span - 1}"
        preposition = "to" if self.kind is StepKind.SEND else "from"
        return f"{self.kind.value} {preposition} rank {self.peer}, {chunks}{', pushed' if self.push else ''}"


Round = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The part of ``rank`` among ``size`` ranks: rounds of steps over chunks 0 to ``chunks`` - 1."""

    collective: str
    algorithm: str
    rank: int
    size: int
    chunks: int
    rounds: tuple[Round, ...]
    order: tuple[int, ...] = ()
    """All ranks, in the order in which a round combines the values of several; empty: by their numbers."""

    @property
    def key(self) -> Callable[[int], int]:
        """By which ranks are sorted into this order."""
        return self.order.index if self.order else int


def send(peer: int, chunk: int, span: int = 1, *, push: bool = False) -> Step:
    return Step(StepKind.SEND, peer, chunk, span, push)


def receive(peer: int, chunk: int, span: int = 1, *, push: bool = False) -> Step:
    return Step(StepKind.RECEIVE, peer, chunk, span, push)


def reduce(peer: int, chunk: int, span: int = 1, *, count: int = 1) -> Step:
    return Step(StepKind.REDUCE, peer, chunk, span, count=count)


def copy(rank: int, chunk: int, span: int = 1) -> Step:
    return Step(StepKind.COPY, rank, chunk, span)
