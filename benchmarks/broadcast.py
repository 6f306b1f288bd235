"""Broadcast: ``collectivesrun -np 2 python -m benchmarks.broadcast -b 64K -e 64M -f 4 -r 0 --peers mpi``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.run import main
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import Case, Result


class Broadcast(definitions.Broadcast, PeersCalls):
    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        self.only_in_place(peer.name, mode)
        return fills(case.work, peer.comm.Bcast, peer.plain(case.work), case.root)

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        self.only_in_place(peer.name, mode)
        return fills(case.work, peer.distributed.broadcast, peer.tensor(case.work), case.root)

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        self.only_in_place(peer.name, mode)
        return fills(case.work, peer.backend.broadcast, peer.plain(case.work), case.root)


BROADCAST = Broadcast()

if __name__ == "__main__":
    main(BROADCAST)
