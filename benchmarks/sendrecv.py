"""Messages in a ring: ``collectivesrun -np 2 python -m benchmarks.sendrecv -b 4 -e 64M -f 4 --peers mpi,gloo``.

Each rank sends to the next one, and receives from the one before, into a buffer of its own. busbw = algbw. The limit: a
memcpy of S bytes on every rank at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import collectives
from benchmarks.collective import (
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    Unavailable,
    fills,
    unavailable,
    whole,
)
from benchmarks.peers import Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


def neighbours(case: Case) -> tuple[int, int]:
    """The next rank, and the one before."""
    return (case.rank + 1) % case.size, (case.rank - 1) % case.size


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    return values.wrong(result, neighbours(case)[1])


def ours(forced: Forced, case: Case, mode: str) -> Result:
    if forced:
        raise Unavailable("collectives: messages between two ranks have no algorithm or transport to choose")
    following, before = neighbours(case)
    return lambda: collectives.sendrecv(case.send, following, case.work, before)


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    following, before = neighbours(case)
    send, work = peer.plain(case.send), peer.plain(case.work)
    return fills(case.work, peer.comm.Sendrecv, send, following, 0, work, before, 0)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    following, before = neighbours(case)
    send, work = peer.tensor(case.send), peer.tensor(case.work)
    both = [
        peer.distributed.P2POp(peer.distributed.isend, send, following),
        peer.distributed.P2POp(peer.distributed.irecv, work, before),
    ]

    def call() -> Any:
        for request in peer.distributed.batch_isend_irecv(both):
            request.wait()
        return case.work

    return call


SENDRECV = Collective(
    name="sendrecv",
    reduces=False,
    rooted=False,
    modes=(OUT_OF_PLACE,),
    send_parts=whole,
    receive_parts=whole,
    factor=lambda ranks: 1.0,
    limit=lambda nbytes, ranks: nbytes,
    limit_text="S bytes on every rank at once",
    wrong=wrong,
    ours=ours,
    persistent=unavailable("persistent: messages between two ranks have no persistent form"),
    mpi=mpi,
    torch=torch,
    cupyx=unavailable("cupyx: no exchange with two different ranks"),
)

if __name__ == "__main__":
    main(SENDRECV)
