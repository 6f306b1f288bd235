"""Broadcast: ``collectivesrun -np 2 python -m benchmarks.broadcast -b 64K -e 64M -f 4 -r 0 --peers mpi``.

busbw = algbw. The limit: a memcpy of S(n-1)/n bytes on every rank at once: S bytes must reach each of n-1 ranks, and
all n ranks can share that work.
"""

from __future__ import annotations

import numpy as np

import collectives
from benchmarks.collective import IN_PLACE, OUT_OF_PLACE, Case, Collective, Forced, Result, Unavailable, fills
from benchmarks.peers import Cupyx, Mpi, Torch
from benchmarks.run import main
from benchmarks.values import Values


class Broadcast(Collective):
    name = "broadcast"
    rooted = True
    modes = (OUT_OF_PLACE, IN_PLACE)

    def factor(self, ranks: int) -> float:
        return 1.0

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        return values.wrong(result, case.root)

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        if mode == IN_PLACE:
            return lambda: collectives.broadcast_(case.work, case.root, **forced)
        return lambda: collectives.broadcast(case.send, case.root, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        self._only_in_place("persistent", mode)
        return collectives.broadcast_init(case.work, case.root)

    def mpi(self, peer: Mpi, case: Case, mode: str) -> Result:
        self._only_in_place(peer.name, mode)
        return fills(case.work, peer.comm.Bcast, peer.plain(case.work), case.root)

    def torch(self, peer: Torch, case: Case, mode: str) -> Result:
        self._only_in_place(peer.name, mode)
        return fills(case.work, peer.distributed.broadcast, peer.tensor(case.work), case.root)

    def cupyx(self, peer: Cupyx, case: Case, mode: str) -> Result:
        self._only_in_place(peer.name, mode)
        return fills(case.work, peer.backend.broadcast, peer.plain(case.work), case.root)

    def _only_in_place(self, name: str, mode: str) -> None:
        if mode == OUT_OF_PLACE:
            raise Unavailable(f"{name}: broadcast works in place only")


BROADCAST = Broadcast()

if __name__ == "__main__":
    main(BROADCAST)
