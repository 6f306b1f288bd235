"""The six collectives: their sizes, their limits, what is right, and how ours is called.

S is the larger of a rank's two buffers, in bytes, and n the number of ranks.
"""

from __future__ import annotations

import numpy as np

import collectives
from collectives.tools.bench.collective import (
    IN_PLACE,
    OPERATIONS,
    OUT_OF_PLACE,
    Case,
    Collective,
    Forced,
    Result,
    Unavailable,
)
from collectives.tools.bench.values import Values


class Allreduce(Collective):
    """busbw = algbw * 2(n-1)/n: with a ring every byte crosses every link so often. The limit: one memcpy of S bytes on
    every rank at once, since every input byte must be read once and every result byte written once."""

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


class Allgather(Collective):
    """S is the whole result. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at once, what
    a rank receives from its peers; its own part is left out."""

    name = "allgather"

    def receive_parts(self, ranks: int) -> int:
        return ranks

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        parts = result.reshape(case.size, case.count)
        return sum(values.wrong(parts[source], source) for source in range(case.size))

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        return lambda: collectives.allgather(case.send, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        return collectives.allgather_init(case.send)


class Broadcast(Collective):
    """busbw = algbw. The limit: a memcpy of S(n-1)/n bytes on every rank at once: S bytes must reach each of n-1 ranks,
    and all n ranks can share that work."""

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
        self.only_in_place("persistent", mode)
        return collectives.broadcast_init(case.work, case.root)

    def only_in_place(self, name: str, mode: str) -> None:
        if mode == OUT_OF_PLACE:
            raise Unavailable(f"{name}: broadcast works in place only")


class Reducescatter(Collective):
    """S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at
    once, what a rank must read of its peers' inputs."""

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


class Alltoall(Collective):
    """S is the whole input of a rank. busbw = algbw * (n-1)/n. The limit: a memcpy of S(n-1)/n bytes on every rank at
    once, what a rank receives from its peers; the block that it keeps is left out."""

    name = "alltoall"

    def send_parts(self, ranks: int) -> int:
        return ranks

    def receive_parts(self, ranks: int) -> int:
        return ranks

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        parts = result.reshape(case.size, case.count)
        return sum(values.wrong(parts[source], source, case.rank * case.count) for source in range(case.size))

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        return lambda: collectives.alltoall(case.send, **forced)

    def persistent(self, case: Case, mode: str) -> Result:
        operation: Result = collectives.alltoall_init(case.send)
        return operation


class Sendrecv(Collective):
    """Each rank sends to the next one, and receives from the one before, into a buffer of its own. busbw = algbw. The
    limit: a memcpy of S bytes on every rank at once."""

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


def neighbours(case: Case) -> tuple[int, int]:
    """The next rank, and the one before."""
    return (case.rank + 1) % case.size, (case.rank - 1) % case.size


COLLECTIVES = {
    each.name: each for each in (Allreduce(), Allgather(), Broadcast(), Reducescatter(), Alltoall(), Sendrecv())
}
"""By their names on the command line."""
