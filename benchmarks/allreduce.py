"""All-reduce: ``collectivesrun -np 2 python -m benchmarks.allreduce -b 64K -e 64M -f 4 --peers mpi``.

busbw = algbw * 2(n-1)/n: with a ring every byte crosses every link so often. The limit: one memcpy of S bytes on every
rank at once, since every input byte must be read once and every result byte written once.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import (
    IN_PLACE,
    OPERATIONS,
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    Unavailable,
    fills,
)
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.prototype import Prototype
from benchmarks.run import main
from benchmarks.sockets import Sockets
from benchmarks.values import Values


class Allreduce(Collective):
    name = "allreduce"
    reduces = True
    modes = (OUT_OF_PLACE, IN_PLACE)
    limit_text = "S bytes on every rank at once"

    def factor(self, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks

    def limit(self, nbytes: int, ranks: int) -> int:
        return nbytes

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        return values.wrong_reduced(result)

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        op = getattr(collectives, OPERATIONS[case.op])
        if mode == IN_PLACE:
            return lambda: collectives.allreduce_(case.work, op=op, **forced)
        return lambda: collectives.allreduce(case.send, op=op, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        op = getattr(collectives, OPERATIONS[case.op])
        if mode == IN_PLACE:
            return collectives.allreduce_init(case.work, op=op)
        return collectives.allreduce_init(case.send, op=op, out=case.work)

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
