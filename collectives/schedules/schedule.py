"""An algorithm as data: what one rank does in a collective, told in rounds of steps over numbered chunks.

The vocabulary is four words. In one round a rank may

    send                  pass a chunk's value on to a peer
    receive               replace a chunk by a peer's value
    receive-and-reduce    combine a chunk with a peer's value
    copy                  put this rank's own contribution into its own result

The steps of a round happen *at once*: what is sent is the value from before the round, and the receives of the round
take effect after it, in the order in which they are written. A receive from oneself is allowed and means this rank's
own value from before the round: it puts the own contribution at a chosen place in the order of a reduction.

Every send meets the receive of its peer in the same round: the k-th send from a to b with the k-th receive by b from a,
over the same chunks. A schedule says nothing about bytes, memory or devices. It is written for one segment and repeated
over all of them by the executor, which may overlap the rounds of different segments.

A step also says who moves the bytes where memory is shared: by default the receiver pulls, but with ``push`` the sender
writes into the receiver's memory, while the block that it has just reduced is still in its cache. Transports that pass
messages have both sides act and ignore it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class StepKind(Enum):
    """What a step does. REDUCE is receive-and-reduce."""

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


Round = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What ``rank`` of ``size`` does: rounds of steps over chunks 0 to ``chunks`` - 1."""

    collective: str
    algorithm: str
    rank: int
    size: int
    chunks: int
    rounds: tuple[Round, ...]


def send(peer: int, chunk: int, span: int = 1, *, push: bool = False) -> Step:
    return Step(StepKind.SEND, peer, chunk, span, push)


def receive(peer: int, chunk: int, span: int = 1, *, push: bool = False) -> Step:
    return Step(StepKind.RECEIVE, peer, chunk, span, push)


def reduce(peer: int, chunk: int, span: int = 1) -> Step:
    return Step(StepKind.REDUCE, peer, chunk, span)


def copy(rank: int, chunk: int, span: int = 1) -> Step:
    return Step(StepKind.COPY, rank, chunk, span)
