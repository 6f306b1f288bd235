"""What one collective is to the benchmark: its sizes, its definitions, and how ours is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.tools.bench.device import HOST, Memory
from collectives.tools.bench.values import Values

OUT_OF_PLACE, IN_PLACE = "out-of-place", "in-place"

OPERATIONS = {"sum": "Sum", "prod": "Product", "min": "Min", "max": "Max", "avg": "Average"}
"""nccl-tests' word for a reduction -> its name in ``collectives``."""


class Unavailable(Exception):
    """A contestant cannot do this row (a dtype or mode it does not have); the text says why."""


@dataclass(frozen=True)
class Case:
    """One row of the table, and the two private buffers that all contestants share.

    ``send`` is this rank's input and is never written during a measurement; ``work`` takes the peers' results, or is
    the tensor of an in-place call. Both are 1-D arrays of ``dtype``, NumPy's or CuPy's.
    """

    dtype: np.dtype
    op: str
    root: int
    rank: int
    size: int
    count: int
    send: Any
    work: Any

    @property
    def nbytes(self) -> int:
        """nccl-tests' size: the larger of the two buffers, in bytes."""
        return int(max(self.send.nbytes, self.work.nbytes))


Forced = dict[str, Any]
"""``algorithm=`` and ``transport=``, as far as they are forced."""

Result = Callable[[], Any]
"""A call that is ready to be timed; returns this rank's result, which a GPU may still be writing."""


class Collective:
    """The definitions of one collective, and how ours is called.

    Sizes follow nccl-tests: S is the larger of a rank's two buffers, in bytes. Unless a collective says otherwise, a
    rank's input and result are each one block, and (n-1)/n of S does not stay where it is.

    Attributes:
        modes: out of place, in place, or both.
        limit_text: what every rank copies in the memory floor, in words.
    """

    name: str
    reduces = rooted = False
    modes: tuple[str, ...] = (OUT_OF_PLACE,)
    limit_text = "S(n-1)/n bytes on every rank at once"

    def send_parts(self, ranks: int) -> int:
        """Of how many blocks of ``count`` elements a rank's input consists."""
        return 1

    def receive_parts(self, ranks: int) -> int:
        """The same of its result."""
        return 1

    def factor(self, ranks: int) -> float:
        """busbw / algbw."""
        return (ranks - 1) / ranks

    def limit(self, nbytes: int, ranks: int) -> int:
        """Bytes that every rank copies in the memory floor, given S."""
        return nbytes * (ranks - 1) // ranks

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """nccl-tests' count for a size in bytes: whole elements, the same for every rank, at least one."""
        return max(1, nbytes // itemsize // self.parts(ranks))

    def parts(self, ranks: int) -> int:
        """Of how many blocks of ``count`` elements the larger of the two buffers consists."""
        return max(self.send_parts(ranks), self.receive_parts(ranks))

    def wrong(self, case: Case, values: Values, result: np.ndarray) -> int:
        """How many elements of a result are wrong."""
        raise NotImplementedError

    def ours(self, forced: Forced, case: Case, mode: str) -> Result:
        raise NotImplementedError

    def persistent(self, case: Case, mode: str) -> Result:
        """Our persistent operation; the result starts it and waits."""
        raise NotImplementedError


FLOOR = "memcpy"
"""The memory floor: the contestant whose time is the least that any implementation could take on this machine.

A collective that only moved bytes would still have to read each one once and write it once. So the limit is one
``memcpy`` between two private arrays, on every rank at once; how many bytes of S is stated by each collective.
"""


def floor(source: Any, target: Any, nbytes: int, memory: Memory = HOST) -> Result:
    """A call that copies ``nbytes`` between two 1-D arrays; unavailable where there are none, as for one rank."""
    if nbytes <= 0:
        raise Unavailable("memcpy: a single rank receives nothing, so there is no limit")
    origin, destination = source.view(np.uint8)[:nbytes], target.view(np.uint8)[:nbytes]

    def call() -> Any:
        memory.copy(destination, origin)
        return destination

    return call
