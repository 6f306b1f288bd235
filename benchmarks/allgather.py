"""Allgather: ``collectivesrun -np 2 python -m benchmarks.allgather -b 64K -e 64M -f 4 --peers mpi``.

S is the whole result. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once, what a rank
receives from its peers; its own part is left out.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import (
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    bytes_of_peers,
    fills,
    per_rank,
    share_of_peers,
    whole,
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    parts = result.reshape(case.size, case.count)
    return sum(values.wrong(parts[source], source) for source in range(case.size))


def ours(forced: Forced, case: Case, mode: str) -> Result:
    return lambda: collectives.allgather(case.send, **forced)


def persistent(case: Case, mode: str) -> Result:
    return collectives.allgather_init(case.send)


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    send, work = peer.plain(case.send), peer.plain(case.work)
    return fills(case.work, peer.comm.Allgather, send, work)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    send, work = peer.tensor(case.send), peer.tensor(case.work)
    return fills(case.work, peer.all_gather, work, send)


def cupyx(peer: Cupyx, case: Case, mode: str) -> Result:
    send, work = peer.plain(case.send), peer.plain(case.work)
    return fills(case.work, peer.backend.all_gather, send, work, send.size)


ALLGATHER = Collective(
    name="allgather",
    reduces=False,
    rooted=False,
    modes=(OUT_OF_PLACE,),
    send_parts=whole,
    receive_parts=per_rank,
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
    main(ALLGATHER)
