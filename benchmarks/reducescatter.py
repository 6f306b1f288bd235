"""Reduce-scatter: ``collectivesrun -np 2 python -m benchmarks.reducescatter -b 64K -e 64M -f 4 --peers mpi``.

S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once,
what a rank must read of its peers' inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import collectives
from benchmarks.collective import (
    OPERATIONS,
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    bytes_of_peers,
    per_rank,
    share_of_peers,
    whole,
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    return values.wrong_reduced(result, case.rank * case.count)


def ours(forced: Forced, case: Case, mode: str) -> Result:
    op = getattr(collectives, OPERATIONS[case.op])
    return lambda: collectives.reducescatter(case.send, op=op, **forced)


def persistent(case: Case, mode: str) -> Result:
    op = getattr(collectives, OPERATIONS[case.op])
    return collectives.reducescatter_init(case.send, op=op)


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    op, send, work = peer.operation(case), case.send, case.work

    def call() -> Any:
        peer.comm.Reduce_scatter_block(send, work, op)
        return work

    return peer.averaged(case, call)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    op, send, work = peer.operation(case), peer.tensor(case.send), peer.tensor(case.work)

    def call() -> Any:
        peer.reduce_scatter(work, send, op)
        return case.work

    return peer.averaged(case, work, call)


def cupyx(peer: Cupyx, case: Case, mode: str) -> Result:
    op, send, work = peer.operation(case), case.send, case.work

    def call() -> Any:
        peer.backend.reduce_scatter(send, work, work.size, op)
        return work

    return call


REDUCESCATTER = Collective(
    name="reducescatter",
    reduces=True,
    rooted=False,
    modes=(OUT_OF_PLACE,),
    send_parts=per_rank,
    receive_parts=whole,
    factor=share_of_peers,
    limit=bytes_of_peers,
    limit_text="S(n-1)/n bytes on every rank at once",
    wrong=wrong,
    ours=ours,
    persistent=persistent,
    mpi=mpi,
    torch=torch,
    cupyx=cupyx,
)

if __name__ == "__main__":
    main(REDUCESCATTER)
