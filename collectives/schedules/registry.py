"""The registry of algorithms. A new algorithm is a module with a tuple ``ALGORITHMS``, listed in `_MODULES`.

The rest of the package reads properties of `find(collective, name)`; only the planners, which choose by size, name
algorithms.
"""

from __future__ import annotations

from collectives import ring
from collectives.schedules import direct, hierarchical, tree
from collectives.schedules.algorithm import Algorithm, Tuned, always
from collectives.schedules.proof.verify import ScheduleError

NATIVE = "native"
"""The name of a library's own collectives: MPI's for host memory, NCCL's for GPU memory."""

INLINE = "inline"
"""The name of the all-reduce whose data travels with the words of the round in which the ranks agree."""

REPRODUCIBLE = "reproducible"
"""Asks for any algorithm that combines by the fixed tree over the ranks; and the name of the one that does so wherever
the ranks are."""

_MODULES = (ring, direct, tree, hierarchical)
_LIBRARIES = (
    Algorithm("allreduce", NATIVE, None),
    Algorithm("allreduce", INLINE, None, on_gpu=False, keeps_order=always),
    *(Algorithm(name, NATIVE, None, on_host=False) for name in ("reducescatter", "allgather", "broadcast")),
)
_ALL: dict[tuple[str, str], Algorithm] = {
    (algorithm.collective, algorithm.name): algorithm
    for algorithm in (*(algorithm for module in _MODULES for algorithm in module.ALGORITHMS), *_LIBRARIES)
}

COLLECTIVES = ("allreduce", "reducescatter", "allgather", "broadcast", "alltoall")
NAMES = tuple(dict.fromkeys(name for _, name in _ALL))
"""The names of the package's own algorithms."""


def add(algorithm: Algorithm) -> Algorithm:
    """Add an algorithm of the user's, or return the one that is there if it is the same.

    Raises:
        ScheduleError: there is another one with its name.
    """
    key = algorithm.collective, algorithm.name
    present = None if algorithm.name in NAMES else _ALL.setdefault(key, algorithm)
    if present is None or present.digest != algorithm.digest:
        raise ScheduleError(
            f"{algorithm.collective}/{algorithm.name}: another algorithm has this name; choose another one"
        )
    return present


def names() -> tuple[str, ...]:
    """The names of all algorithms, those of the user included."""
    return tuple(dict.fromkeys(name for _, name in _ALL))


def signed(name: str, collective: str = "") -> str:
    """An algorithm's name as ranks compare it: ``name@digest`` of what this rank has registered under it, of one
    collective or of all; the name itself if it is the package's own, or signed."""
    digests = [each.digest for (of, known), each in _ALL.items() if known == name and collective in ("", of)]
    return f"{name}@{'+'.join(digests)}" if any(digests) else name


def unsigned(name: str) -> str:
    """The name without what `signed` has added."""
    return name.partition("@")[0]


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of a collective.

    Raises:
        KeyError: the collective has no such algorithm.
    """
    return _ALL[collective, name]


def on_host(collective: str) -> tuple[str, ...]:
    """Names of a collective's algorithms that serve host memory."""
    return tuple(name for (of, name), algorithm in _ALL.items() if of == collective and algorithm.on_host)


def on_gpu(collective: str) -> tuple[str, ...]:
    """Names of a collective's algorithms that serve GPU memory."""
    return tuple(name for (of, name), algorithm in _ALL.items() if of == collective and algorithm.on_gpu)


def tuned(one_host: bool) -> tuple[str, ...]:
    """Names of the algorithms that autotuning tries where all ranks are on one host, or on several."""
    tries = (Tuned.ALWAYS, Tuned.ONE_HOST if one_host else Tuned.SEVERAL_HOSTS)
    return tuple(dict.fromkeys(name for (_, name), algorithm in _ALL.items() if algorithm.tuned in tries))
