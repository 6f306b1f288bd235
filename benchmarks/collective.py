"""What one collective is to the benchmark: its sizes, its definitions, and how each contestant calls it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.values import Values

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
"""A call that is ready to be timed; returns the array that holds this rank's result, which a GPU may still be
writing."""


def fills(work: Any, call: Callable[..., Any], *arguments: Any) -> Result:
    """``call(*arguments)``, which leaves this rank's result in ``work``."""

    def run() -> Any:
        call(*arguments)
        return work

    return run


def unavailable(text: str) -> Callable[..., Result]:
    """A contestant that can do no row of a collective, for the reason that ``text`` says."""

    def refuse(*_: Any) -> Result:
        raise Unavailable(text)

    return refuse


def _allreduce_only(peer: Any, case: Case, mode: str) -> Result:
    raise Unavailable(f"{peer.name}: all-reduce only")


@dataclass(frozen=True)
class Collective:
    """The definitions of one collective. Sizes follow nccl-tests: S is the larger of a rank's two buffers, in bytes."""

    name: str
    reduces: bool
    rooted: bool
    modes: tuple[str, ...]
    send_parts: Callable[[int], int]
    """Of how many blocks of ``count`` elements a rank's input consists, given the number of ranks."""
    receive_parts: Callable[[int], int]
    """The same of its result."""
    factor: Callable[[int], float]
    """busbw / algbw, given the number of ranks."""
    limit: Callable[[int, int], int]
    """Bytes that every rank copies in the memory floor, given (S, ranks)."""
    limit_text: str
    wrong: Callable[[Case, Values, np.ndarray], int]
    """How many elements of a result are wrong."""
    ours: Callable[[Forced, Case, str], Result]
    persistent: Callable[[Case, str], Result]
    """Our persistent operation; the result starts it and waits."""
    mpi: Callable[[Any, Case, str], Result]
    torch: Callable[[Any, Case, str], Result]
    """torch.distributed's call, over gloo or NCCL."""
    cupyx: Callable[[Any, Case, str], Result]
    prototype: Callable[[Any, Case, str], Result] = _allreduce_only
    sockets: Callable[[Any, Case, str], Result] = _allreduce_only

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """nccl-tests' count for a size in bytes: whole elements, the same for every rank, at least one."""
        return max(1, nbytes // itemsize // self.parts(ranks))

    def parts(self, ranks: int) -> int:
        """Of how many blocks of ``count`` elements the larger of the two buffers consists."""
        return max(self.send_parts(ranks), self.receive_parts(ranks))


def whole(ranks: int) -> int:
    """A buffer of one block, whatever the number of ranks."""
    return 1


def per_rank(ranks: int) -> int:
    """A buffer with one block for every rank."""
    return ranks


def share_of_peers(ranks: int) -> float:
    """(n-1)/n: the part that does not stay where it is."""
    return (ranks - 1) / ranks


def bytes_of_peers(nbytes: int, ranks: int) -> int:
    """S (n-1)/n, in bytes."""
    return nbytes * (ranks - 1) // ranks
