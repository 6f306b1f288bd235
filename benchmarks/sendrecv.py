"""Messages in a ring: ``collectivesrun -np 2 python -m benchmarks.sendrecv -b 4 -e 64M -f 4 --peers mpi,gloo``."""

from __future__ import annotations

from benchmarks.peers import Cupyx, Mpi, PeersCalls, Torch, fills
from benchmarks.run import main
from collectives.tools.bench import definitions
from collectives.tools.bench.collective import Case, Result, Unavailable
from collectives.tools.bench.definitions import neighbours


class Sendrecv(definitions.Sendrecv, PeersCalls):
    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        following, before = neighbours(case)
        send, work = peer.plain(case.send), peer.plain(case.work)
        return fills(case.work, peer.comm.Sendrecv, send, following, 0, work, before, 0)

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        following, before = neighbours(case)
        both = [
            peer.distributed.P2POp(peer.distributed.isend, peer.tensor(case.send), following),
            peer.distributed.P2POp(peer.distributed.irecv, peer.tensor(case.work), before),
        ]

        def exchange() -> None:
            for request in peer.distributed.batch_isend_irecv(both):
                request.wait()

        return fills(case.work, exchange)

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        raise Unavailable("cupyx: no exchange with two different ranks")


SENDRECV = Sendrecv()

if __name__ == "__main__":
    main(SENDRECV)
