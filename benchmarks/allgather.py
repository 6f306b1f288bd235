"""Allgather: ``collectivesrun -np 2 python -m benchmarks.allgather -b 64K -e 64M -f 4 --peers mpi``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.run import main
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import Case, Result


class Allgather(definitions.Allgather, PeersCalls):
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
