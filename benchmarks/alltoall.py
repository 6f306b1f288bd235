"""All-to-all: ``collectivesrun -np 2 python -m benchmarks.alltoall -b 64K -e 64M -f 4 --peers mpi``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.run import main
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import Case, Result


class Alltoall(definitions.Alltoall, PeersCalls):
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
