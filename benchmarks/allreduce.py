"""All-reduce: ``collectivesrun -np 2 python -m benchmarks.allreduce -b 64K -e 64M -f 4 --peers mpi``.

busbw = algbw * 2(n-1)/n: with a ring every byte crosses every link so often. The limit: one memcpy of S bytes on every
rank at once, since every input byte must be read once and every result byte written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import collectives
from benchmarks.collective import (
    IN_PLACE,
    OPERATIONS,
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    Unavailable,
    share_of_peers,
    whole,
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.prototype import Prototype
from benchmarks.run import main
from benchmarks.sockets import Sockets
from benchmarks.values import Values


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    return values.wrong_reduced(result)


def ours(forced: Forced, case: Case, mode: str) -> Result:
    op = getattr(collectives, OPERATIONS[case.op])
    if mode == IN_PLACE:
        return lambda: collectives.allreduce_(case.work, op=op, **forced)
    return lambda: collectives.allreduce(case.send, op=op, **forced)


def persistent(case: Case, mode: str) -> Result:
    op = getattr(collectives, OPERATIONS[case.op])
    if mode == IN_PLACE:
        return collectives.allreduce_init(case.work, op=op)
    return collectives.allreduce_init(case.send, op=op, out=case.work)


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    op, work = peer.operation(case), case.work
    source = peer.in_place if mode == IN_PLACE else case.send

    def call() -> Any:
        peer.comm.Allreduce(source, work, op)
        return work

    return peer.averaged(case, call)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    if mode == OUT_OF_PLACE:
        raise Unavailable(f"{peer.name}: all_reduce works in place only")
    op, tensor = peer.operation(case), peer.tensor(case.work)

    def call() -> Any:
        peer.distributed.all_reduce(tensor, op)
        return case.work

    return peer.averaged(case, tensor, call)


def cupyx(peer: Cupyx, case: Case, mode: str) -> Result:
    op, work = peer.operation(case), case.work
    source = work if mode == IN_PLACE else case.send

    def call() -> Any:
        peer.backend.all_reduce(source, work, op)
        return work

    return call


def by_itself(peer: Prototype | Sockets, case: Case, mode: str) -> Result:
    return peer.allreduce(case, mode)


ALLREDUCE = Collective(
    name="allreduce",
    reduces=True,
    rooted=False,
    modes=(OUT_OF_PLACE, IN_PLACE),
    send_parts=whole,
    receive_parts=whole,
    factor=lambda ranks: 2 * share_of_peers(ranks),
    limit=lambda nbytes, ranks: nbytes,
    limit_text="S bytes on every rank at once",
    wrong=wrong,
    ours=ours,
    persistent=persistent,
    mpi=mpi,
    torch=torch,
    cupyx=cupyx,
    prototype=by_itself,
    sockets=by_itself,
)

if __name__ == "__main__":
    main(ALLREDUCE)
