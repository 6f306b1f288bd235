"""Messages in a ring: ``collectivesrun -np 2 python -m benchmarks.sendrecv -b 4 -e 64M -f 4 --peers mpi,gloo``.

Each rank sends to the next one, and receives from the one before, into a buffer of its own. busbw = algbw. The limit: a
memcpy of S bytes on every rank at once.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import Case, Collective, Forced, Result, Unavailable, fills
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


class Sendrecv(Collective):
    name = "sendrecv"
    limit_text = "S bytes on every rank at once"

    def factor(self, ranks: int) -> float:
        return 1.0

    def limit(self, nbytes: int, ranks: int) -> int:
        return nbytes

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        return values.wrong(result, neighbours(case)[1])

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        if forced:
            raise Unavailable("collectives: messages between two ranks have no algorithm or transport to choose")
        following, before = neighbours(case)
        return lambda: collectives.sendrecv(case.send, following, case.work, before)

    def persistent(self, case: Case, mode: str) -> Result:
        raise Unavailable("persistent: messages between two ranks have no persistent form")

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


def neighbours(case: Case) -> tuple[int, int]:
    """The next rank, and the one before."""
    return (case.rank + 1) % case.size, (case.rank - 1) % case.size


SENDRECV = Sendrecv()

if __name__ == "__main__":
    main(SENDRECV)
