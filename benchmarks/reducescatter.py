"""Reduce-scatter: ``collectivesrun -np 2 python -m benchmarks.reducescatter -b 64K -e 64M -f 4 --peers mpi``.

S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once,
what a rank must read of its peers' inputs.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import OPERATIONS, Case, Collective, Forced, Result, fills
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


class Reducescatter(Collective):
    name = "reducescatter"
    reduces = True

    def send_parts(self, ranks: int) -> int:
        return ranks

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        return values.wrong_reduced(result, case.rank * case.count)

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        op = getattr(collectives, OPERATIONS[case.op])
        return lambda: collectives.reducescatter(case.send, op=op, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        return collectives.reducescatter_init(case.send, op=getattr(collectives, OPERATIONS[case.op]))

    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        call = fills(case.work, peer.comm.Reduce_scatter_block, case.send, case.work, peer.operation(case))
        return peer.averaged(case, call)

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        op, send, work = peer.operation(case), peer.tensor(case.send), peer.tensor(case.work)
        return peer.averaged(case, work, fills(case.work, peer.reduce_scatter, work, send, op))

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        op, work = peer.operation(case), case.work
        return fills(work, peer.backend.reduce_scatter, case.send, work, work.size, op)


REDUCESCATTER = Reducescatter()

if __name__ == "__main__":
    main(REDUCESCATTER)
