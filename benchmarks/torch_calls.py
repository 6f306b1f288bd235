"""Calls of torch.distributed over our backend and over gloo: ``collectivesrun -np 2 python -m benchmarks.torch_calls``.

Two process groups of the same ranks take turns, call by call, on the same tensors. The latency of ``all_reduce`` from
4 KiB to 4 MiB is what a tensor-parallel server on CPUs waits for after each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.peers import connect_all
from collectives.tools.bench import cli
from collectives.tools.bench.measure import OURS
from collectives.tools.bench.ranks import Ranks, session

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20)
_CALLS = 10
"""Of a contestant in each round."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(prog="benchmarks.torch_calls", description="Calls of torch.distributed, over ours and gloo.")
    flags.add_count("-n", "--rounds", default=30, help="timed rounds of 10 calls each")
    flags.add_count("-w", "--warmup", default=5, help="untimed rounds before them", least=0)
    flags.add_json()
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    with session() as ranks, connect_all(["gloo"], ranks) as peers:
        if not peers:
            return
        content = {"records": measure(options, ranks)}
        common.write_results(options.json, ranks, "torch_calls", "microseconds per call", content)


def measure(options: Any, ranks: Ranks) -> list[dict[str, Any]]:
    """A record for each call and size; rank 0 prints them."""
    import torch.distributed as dist

    groups = {OURS: dist.new_group(backend="collectives"), "gloo": dist.group.WORLD}
    ranks.say(f"# {common.place_of(ranks)}; torch {torch.__version__}; medians of {options.rounds} rounds in turn")
    ranks.say(f"#{'call':<24}{'bytes':>10}{'ours us':>10}{'gloo us':>10}{'of gloo':>9}")
    records = []
    for name in CALLS:
        for nbytes in SIZES:
            steps = {which: repeated(CALLS[name](nbytes // 4, ranks.size, group)) for which, group in groups.items()}
            seconds = common.time_in_turn(ranks, steps, options.warmup, options.rounds)
            ours, gloo = (np.median(seconds[which]) * 1e6 / _CALLS for which in groups)
            ranks.say(
                f" {name:<24}{nbytes:>10}{ours:>10.1f}{gloo:>10.1f}{np.median(seconds[OURS] / seconds['gloo']):>9.3f}"
            )
            records.append({"call": name, "bytes": nbytes, "ours": float(ours), "gloo": float(gloo)})
    return records


def repeated(call: Callable[[], object]) -> Callable[[], object]:
    def block() -> None:
        for _ in range(_CALLS):
            call()

    return block


def all_reduce(count: int, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.zeros(count)
    return lambda: torch.distributed.all_reduce(tensor, group=group)


def asynchronous(count: int, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.zeros(count)
    return lambda: torch.distributed.all_reduce(tensor, group=group, async_op=True).wait()


def all_gather(count: int, size: int, group: Any) -> Callable[[], object]:
    whole, part = torch.zeros(count * size), torch.zeros(count)
    return lambda: torch.distributed.all_gather_into_tensor(whole, part, group=group)


def reduce_scatter(count: int, size: int, group: Any) -> Callable[[], object]:
    whole, part = torch.zeros(count * size), torch.zeros(count)
    return lambda: torch.distributed.reduce_scatter_tensor(part, whole, group=group)


def broadcast(count: int, size: int, group: Any) -> Callable[[], object]:
    tensor = torch.zeros(count)
    return lambda: torch.distributed.broadcast(tensor, 0, group=group)


CALLS: dict[str, Callable[[int, int, Any], Callable[[], object]]] = {
    "all_reduce": all_reduce,
    "all_reduce, async": asynchronous,
    "all_gather_into_tensor": all_gather,
    "reduce_scatter_tensor": reduce_scatter,
    "broadcast": broadcast,
}
"""By name: what makes a call of tensors of so many elements, or parts, on a group of ``size`` ranks."""


if __name__ == "__main__":
    main()
