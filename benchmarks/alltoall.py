"""All-to-all: ``collectivesrun -np 2 python -m benchmarks.alltoall -b 64K -e 64M -f 4 --peers mpi``.

S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once,
what a rank receives from its peers; the block that it keeps is left out.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import Case, Collective, Forced, Result, fills
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


class Alltoall(Collective):
    name = "alltoall"

    def send_parts(self, ranks: int) -> int:
        return ranks

    def receive_parts(self, ranks: int) -> int:
        return ranks

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        parts = result.reshape(case.size, case.count)
        return sum(values.wrong(parts[source], source, case.rank * case.count) for source in range(case.size))

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        return lambda: collectives.alltoall(case.send, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        operation: Result = collectives.alltoall_init(case.send)
        return operation

    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        return fills(case.work, peer.comm.Alltoall, peer.plain(case.send), peer.plain(case.work))

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        return fills(case.work, peer.distributed.all_to_all_single, peer.tensor(case.work), peer.tensor(case.send))

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        send, work = (peer.plain(array).reshape(case.size, -1) for array in (case.send, case.work))
        return fills(case.work, peer.backend.all_to_all, send, work)


ALLTOALL = Alltoall()

if __name__ == "__main__":
    main(ALLTOALL)
