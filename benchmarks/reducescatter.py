"""Reduce-scatter: ``collectivesrun -np 2 python -m benchmarks.reducescatter -b 64K -e 64M -f 4 --peers mpi``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.run import main
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import Case, Result


class Reducescatter(definitions.Reducescatter, PeersCalls):
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
