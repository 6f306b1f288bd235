"""All-to-all: ``collectivesrun -np 2 python -m benchmarks.alltoall -b 64K -e 64M -f 4 --peers mpi``.

S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once,
what a rank receives from its peers; the block that it keeps is left out.
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
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


def wrong(case: Case, values: Values, result: np.ndarray) -> int:
    parts = result.reshape(case.size, case.count)
    return sum(values.wrong(parts[source], source, case.rank * case.count) for source in range(case.size))


def ours(forced: Forced, case: Case, mode: str) -> Result:
    return lambda: collectives.alltoall(case.send, **forced)


def persistent(case: Case, mode: str) -> Result:
    operation: Result = collectives.alltoall_init(case.send)
    return operation


def mpi(peer: Mpi, case: Case, mode: str) -> Result:
    send, work = peer.plain(case.send), peer.plain(case.work)
    return fills(case.work, peer.comm.Alltoall, send, work)


def torch(peer: Torch, case: Case, mode: str) -> Result:
    send, work = peer.tensor(case.send), peer.tensor(case.work)
    return fills(case.work, peer.distributed.all_to_all_single, work, send)


def cupyx(peer: Cupyx, case: Case, mode: str) -> Result:
    send, work = (peer.plain(array).reshape(case.size, -1) for array in (case.send, case.work))
    return fills(case.work, peer.backend.all_to_all, send, work)


ALLTOALL = Collective(
    name="alltoall",
    reduces=False,
    rooted=False,
    modes=(OUT_OF_PLACE,),
    send_parts=per_rank,
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
    main(ALLTOALL)
