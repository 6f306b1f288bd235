"""Broadcast: ``collectivesrun -np 2 python -m benchmarks.broadcast -b 64K -e 64M -f 4 -r 0 --peers mpi``.

busbw = algbw. The limit: a memcpy of S(n-1)/n bytes on every rank at once: S bytes must reach each of n-1 ranks, and
all n ranks can share that work.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import (
    IN_PLACE,
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    Unavailable,
    bytes_of_peers,
    fills,
    whole,
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    return values.wrong(result, case.root)


def ours(forced: Forced, case: Case, mode: str) -> Result:
    if mode == IN_PLACE:
        return lambda: collectives.broadcast_(case.work, case.root, **forced)
    return lambda: collectives.broadcast(case.send, case.root, **forced)


def persistent(case: Case, mode: str) -> Result:
    if mode == OUT_OF_PLACE:
        raise Unavailable("persistent: broadcast works in place only")
    return collectives.broadcast_init(case.work, case.root)


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    if mode == OUT_OF_PLACE:
        raise Unavailable("mpi: Bcast works in place only")
    work = peer.plain(case.work)
    return fills(case.work, peer.comm.Bcast, work, case.root)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    if mode == OUT_OF_PLACE:
        raise Unavailable(f"{peer.name}: broadcast works in place only")
    tensor = peer.tensor(case.work)
    return fills(case.work, peer.distributed.broadcast, tensor, case.root)


def cupyx(peer: Cupyx, case: Case, mode: str) -> Result:
    if mode == OUT_OF_PLACE:
        raise Unavailable("cupyx: broadcast works in place only")
    work = peer.plain(case.work)
    return fills(case.work, peer.backend.broadcast, work, case.root)


BROADCAST = Collective(
    name="broadcast",
    reduces=False,
    rooted=True,
    modes=(OUT_OF_PLACE, IN_PLACE),
    send_parts=whole,
    receive_parts=whole,
    factor=lambda ranks: 1.0,
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
    main(BROADCAST)
