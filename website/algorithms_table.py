"""The table of algorithms, from their schedules and the planners."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import ceil, isclose, log2

from collectives.base.config import in_units
from collectives.cuda.planner import DeviceFacts, DevicePlanner
from collectives.plan.planner import Placement, Planner
from collectives.schedules import registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.schedule import StepKind
from collectives.tools.drawing import with_schedules

_FORMULAS: tuple[tuple[str, Callable[[int, int], float]], ...] = (
    ("1", lambda n, hosts: 1),
    ("2", lambda n, hosts: 2),
    ("N-1", lambda n, hosts: n - 1),
    ("2(N-1)", lambda n, hosts: 2 * (n - 1)),
    ("2, or 4 on hosts of 2^k ranks", lambda n, hosts: 2 if hosts == 1 or (n // hosts) & (n // hosts - 1) else 4),
    ("2H on H hosts", lambda n, hosts: 2 * hosts),
    ("(N-1)/N", lambda n, hosts: (n - 1) / n),
    ("2(N-1)/N", lambda n, hosts: 2 * (n - 1) / n),
    ("⌈log2 N⌉", lambda n, hosts: ceil(log2(n))),
    ("log2 N, or ⌊log2 N⌋ + 2 if not whole", lambda n, hosts: n.bit_length() - 1 + 2 * (n & (n - 1) > 0)),
)
"""What a table's figures may be, of N ranks on so many hosts."""
_SHAPES = [(n, hosts) for hosts in (1, 2, 3, 4) for n in range(2, 25) if n % hosts == 0 and n > hosts]


def table() -> str:
    """The package's algorithms that have schedules, as a Markdown table: rounds and bytes from the schedules, and from
    the planners for what each is chosen.

    Bytes are the most that any rank sends or receives, of S bytes of the tensor (of an allgather: of the result; of an
    all-to-all: that a rank sends in all).
    """
    chosen: dict[tuple[str, str], dict[str, None]] = {}
    for collective, algorithm, why in _choices():
        chosen.setdefault((collective, algorithm), {})[why] = None
    rows = ["| collective | algorithm | rounds | bytes per rank | chosen for |", "|---|---|---|---|---|"]
    for each in (each for each in with_schedules() if not each.digest):
        costs = [_costs(each, *shape) for shape in _SHAPES]
        rounds, nbytes = (_formula([cost[column] for cost in costs]) for column in (0, 1))
        factor = {"1": "", "N-1": "(N-1) "}.get(nbytes, nbytes + " ")
        why = "; ".join(chosen.get((each.collective, each.name), ())) or "when asked for"
        rows.append(f"| {each.collective} | `{each.name}` | {rounds} | {factor}S | {why} |")
    return "\n".join(rows) + "\n"


def _costs(algorithm: Algorithm, size: int, hosts: int) -> tuple[float, float]:
    """Rounds, and the most bytes that a rank sends or receives, in tensors."""
    width = size // hosts
    of_rank = algorithm.schedules([range(at, at + width) for at in range(0, size, width)])
    schedules = [of_rank(rank) for rank in range(size)]
    share = size / schedules[0].chunks if algorithm.collective == "alltoall" else 1 / schedules[0].chunks
    most = 0
    for rank, schedule in enumerate(schedules):
        moved = [0, 0]
        for step in (step for steps in schedule.rounds for step in steps if step.peer != rank):
            moved[step.kind is StepKind.SEND] += step.span
        most = max(most, *moved)
    return len(schedules[0].rounds), most * share


def _formula(costs: Sequence[float]) -> str:
    """The first of `_FORMULAS` that gives all costs; else the cost of eight ranks on one host."""
    for text, formula in _FORMULAS:
        if all(isclose(formula(*shape), cost) for shape, cost in zip(_SHAPES, costs, strict=True)):
            return text
    return f"{costs[_SHAPES.index((8, 1))]:.4g} for 8 ranks"


def _choices() -> Iterator[tuple[str, str, str]]:
    """Collective, algorithm and the reason for it, over placements, media and sizes."""
    for size in (2, 4, 8, 16):
        one, spread = (tuple(range(size)),), tuple((rank,) for rank in range(size))
        blocks = (tuple(range(size // 2)), tuple(range(size // 2, size)))
        for hosts, network in ((one, "mpi"), (spread, "mpi"), (spread, "tcp"), (blocks, "mpi")):
            shared = hosts is not spread
            placement = Placement(0, size, hosts, shared, shared, shared, network == "tcp", network)
            devices = DevicePlanner(placement, DeviceFacts(nccl="" if network == "mpi" else "none"))
            for collective in registry.COLLECTIVES:
                for nbytes in (1 << power for power in range(2, 27, 2)):
                    native = collective not in ("allreduce", "reducescatter")
                    host = Planner(placement).choose(collective, nbytes)
                    device = devices.choose(collective, nbytes, native=native)
                    for choice, prefix in ((host, ""), (device, "GPUs: ")):
                        why = re.sub(r"(\d+) bytes", lambda found: in_units(int(found[1])), choice.why)
                        yield collective, choice.algorithm, prefix + why.split("; ")[0]
