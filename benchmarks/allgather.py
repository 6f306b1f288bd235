"""Allgather: ``collectivesrun -np 2 python -m benchmarks.allgather -b 64K -e 64M -f 4 --peers mpi``.

S is the whole result. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once, what a rank
receives from its peers; its own part is left out.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import Case, Collective, Forced, Result, fills
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


class Allgather(Collective):
    name = "allgather"

    def receive_parts(self, ranks: int) -> int:
        return ranks

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        parts = result.reshape(case.size, case.count)
        return sum(values.wrong(parts[source], source) for source in range(case.size))

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        return lambda: collectives.allgather(case.send, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        return collectives.allgather_init(case.send)

    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        return fills(case.work, peer.comm.Allgather, peer.plain(case.send), peer.plain(case.work))

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        return fills(case.work, peer.all_gather, peer.tensor(case.work), peer.tensor(case.send))

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        send, work = peer.plain(case.send), peer.plain(case.work)
        return fills(case.work, peer.backend.all_gather, send, work, send.size)


ALLGATHER = Allgather()

if __name__ == "__main__":
    main(ALLGATHER)
