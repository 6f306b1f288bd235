"""All-reduce: ``collectivesrun -np 2 python -m benchmarks.allreduce -b 64K -e 64M -f 4 --peers mpi``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.prototype import Prototype
from benchmarks.run import main
from benchmarks.sockets import Sockets
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import IN_PLACE, OUT_OF_PLACE, Case, Result, Unavailable


class Allreduce(definitions.Allreduce, PeersCalls):
    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        source = peer.in_place if mode == IN_PLACE else case.send
        return peer.averaged(case, fills(case.work, peer.comm.Allreduce, source, case.work, peer.operation(case)))

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        if mode == OUT_OF_PLACE:
            raise Unavailable(f"{peer.name}: all_reduce works in place only")
        op, tensor = peer.operation(case), peer.tensor(case.work)
        return peer.averaged(case, tensor, fills(case.work, peer.distributed.all_reduce, tensor, op))

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        op, source = peer.operation(case), case.work if mode == IN_PLACE else case.send
        return fills(case.work, peer.backend.all_reduce, source, case.work, op)

    def by_itself(self, peer: Prototype | Sockets, case: Case, mode: str) -> Result:
        return peer.allreduce(case, mode)


ALLREDUCE = Allreduce()

if __name__ == "__main__":
    main(ALLREDUCE)
