"""An algorithm and its properties: everything that planning, lowering, fusion and tuning need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from collectives.schedules.schedule import Schedule


class Tuned(Enum):
    """Where autotuning tries an algorithm."""

    NEVER = ""
    ONE_HOST = "one host"
    SEVERAL_HOSTS = "several hosts"
    ALWAYS = "always"


Hosts = Sequence[Sequence[int]]
"""The ranks on each host."""


def always(hosts: Hosts) -> bool:
    """An algorithm's property that does not depend on where the ranks are."""
    return True


def never(hosts: Hosts) -> bool:
    """The opposite of `always`."""
    return False


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One algorithm of one collective. An algorithm's module lists its own in ``ALGORITHMS``, beside the schedules."""

    collective: str
    name: str
    build: Callable[..., Schedule] | None
    """Makes the schedule of a rank: ``build(rank, size)``; ``build(rank, size, root)`` for a broadcast; ``build(rank,
    hosts)`` with `spans_hosts`. None if something else carries out the whole collective: MPI, NCCL, or the control
    plane."""
    one_chunk: bool = False
    """The tensor is one chunk; otherwise there are at least as many chunks as ranks."""
    versioned: bool = False
    """A rank writes a chunk while a peer may still read it, so that each version of the chunk needs a place of its own:
    windows or messages, no direct reads."""
    by_messages: bool = True
    """It also works with messages; otherwise in the windows of one host only."""
    spans_hosts: bool = False
    """Its schedule distinguishes ranks of one host from ranks of others."""
    passes_on: bool = False
    """A rank passes on to one neighbour what it received from another: peers read outputs, not only inputs, and
    cutting chunks into segments keeps all links busy."""
    owner_pushes: bool = False
    """Its two rounds: a rank reduces its chunk from the peers' inputs, and pushes it into their outputs. They need no
    memory in between, so they merge into one kernel and work on lists of addresses."""
    overlaps: bool = True
    """With direct reads the rounds of different segments overlap; otherwise a segment goes through all rounds while it
    is in cache."""
    on_host: bool = True
    """It serves host memory."""
    on_gpu: bool = True
    """It serves GPU memory, by kernels or NCCL."""
    tuned: Tuned = Tuned.NEVER
    """Where autotuning tries it."""
    sizes: frozenset[int] | None = None
    """The numbers of ranks that it serves; None: all. One rank is always served."""
    digest: str = ""
    """A hash of its steps, which ranks compare, because each has registered its own; empty: part of the package."""
    keeps_order: Callable[[Hosts], bool] = never
    """Whether all that it combines is combined by the fixed tree over all ranks (`schedules.fixed_tree`), given the
    ranks on each host."""

    def why_not(self, hosts: Sequence[Sequence[int]]) -> str:
        """Why it does not serve these ranks; empty if it does."""
        size = sum(map(len, hosts))
        if size > 1 and self.sizes is not None and size not in self.sizes:
            served = ", ".join(map(str, sorted(self.sizes)[:8])) + ", ..." * (len(self.sizes) > 8)
            return (
                f"algorithm={self.name!r} was proved for {served} ranks, not for {size}; register it with sizes= that "
                f"include {size}"
            )
        if self.digest and self.spans_hosts and len({len(ranks) for ranks in hosts}) > 1:
            return (
                f"algorithm={self.name!r} needs the same number of ranks on every host, got {[len(r) for r in hosts]}"
            )
        return ""

    @property
    def native(self) -> bool:
        """Whether a library or the control plane carries out the whole collective."""
        return self.build is None

    def schedules(self, hosts: Hosts, root: int = 0) -> Callable[[int], Schedule]:
        """The schedule of any rank.

        Args:
            hosts: the ranks on each host.
            root: of a broadcast.
        """
        build, size = self.build, sum(map(len, hosts))
        assert build is not None, f"{self.name} has no schedule"
        if self.spans_hosts:
            return lambda rank: build(rank, hosts)
        if self.collective == "broadcast":
            return lambda rank: build(rank, size, root)
        return lambda rank: build(rank, size)
