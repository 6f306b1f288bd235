"""What the distributed optimizer's Python costs in a backward pass.

    collectivesrun -np 2 python -m benchmarks.torch_hooks

torch calls a hook for a parameter whose gradient is there. Rank 0 makes its backward pass while the others wait at a
barrier, so that what can be submitted is submitted and nothing can travel: what is measured is the caller's Python, and
not the communication. Then the others follow.

    call       a clock around each call of a hook, less what the clock itself shows; also of those that fill a bucket
               and submit it
    parameter  all calls of a backward pass together, divided by the parameters: tiny ones share one hook
    backward   the backward pass with hooks, less that of a copy of the model without, divided by the parameters: also
               torch's way into Python, and what the engine's thread takes from the caller while it offers the buckets
               to the others
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.torch_models import MODELS
from collectives.tools.bench import cli
from collectives.tools.bench.measure import Summary
from collectives.tools.bench.ranks import Ranks, session

TARGET = 10.0
"""Microseconds: what the median call should cost at most."""

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "groups": {"groups": 10},
}
"""Name -> arguments of the distributed optimizer."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.torch_hooks",
        description="What each parameter costs in Python during a backward pass in torch.",
    )
    flags.add_argument("--model", choices=tuple(MODELS), default="mlp", help="whose parameters")
    flags.add_count("-n", "--steps", default=50, help="timed steps")
    flags.add_count("-w", "--warmup", default=5, help="untimed steps before them", least=0)
    flags.add_json()
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    with session() as ranks:
        records = measure(options, ranks)
        content = {"model": options.model, "records": records}
        common.write_results(options.json, ranks, "torch_hooks", "microseconds per parameter", content)


def measure(settings: Any, ranks: Ranks) -> list[dict[str, Any]]:
    """All variants, one after another; rank 0's figures, on rank 0 only."""
    make, shape = MODELS[settings.model]
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1 + ranks.rank))
    ranks.say(
        f"# {settings.model}: {len(list(model.parameters()))} parameters; {ranks.size} ranks, torch {torch.__version__}"
    )
    ranks.say(
        f"# microseconds per parameter on rank 0, {settings.steps} steps, nothing travels; wanted: a median of at most "
        f"{TARGET:g}"
    )
    heads = (
        f"{'calls':>7}{'call':>10}{'p25':>8}{'p75':>8}{'parameter':>12}{'p25':>8}{'p75':>8}{'backward':>12}"
        f"{'p25':>8}{'p75':>8}"
    )
    ranks.say(f"#{'':<10}{heads}")
    records: list[dict[str, Any]] = []
    if ranks.size == 1:
        ranks.say("# one rank has nobody to send gradients to, and so no hooks")
        return records
    for name, options in VARIANTS.items():
        calls, inside, added = variant(model, inputs, options, settings, ranks)
        if ranks.rank == 0:
            parts = {"call": calls, "parameter": inside, "backward": added}
            summaries = {part: Summary.of(samples).as_dict() for part, samples in parts.items()}
            records.append({"variant": name, "calls": len(calls) / settings.steps, **summaries})
            ranks.say(line(records[-1]))
    return records


def variant(
    model: Any, inputs: Any, options: dict[str, Any], settings: Any, ranks: Ranks
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train ``steps`` steps.

    Returns:
        Microseconds: of each call of a hook; and, divided by the parameters, of all calls of each backward pass, and
            what the pass took longer.
    """
    plain, hooked, clocked = (copy.deepcopy(model) for _ in range(3))
    optimizers = [distributed(hooked, options)]
    calls: list[float] = []
    with clocked_hooks(calls):
        optimizers.append(distributed(clocked, options))
    all_calls: list[float] = []
    inside: list[float] = []
    added: list[float] = []
    count = len(list(plain.parameters()))
    for step in range(-settings.warmup, settings.steps):
        for first in (True, False):
            if first == (ranks.rank == 0):
                without, within, _ = (backward(one, inputs) for one in (plain, hooked, clocked))
            ranks.barrier()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        plain.zero_grad()
        if step >= 0:
            all_calls += calls
            inside.append(sum(calls) / count)
            added.append((within - without) / count)
        calls.clear()
    return 1e6 * np.array(all_calls), 1e6 * np.array(inside), 1e6 * np.array(added)


def distributed(model: Any, options: dict[str, Any]) -> Any:
    """Our optimizer, which leaves the weights as they are."""
    import collectives.torch as hvd

    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), named_parameters=model.named_parameters(), **options
    )


def backward(model: Any, inputs: Any) -> float:
    """Seconds of one backward pass."""
    loss = model(inputs)
    gc.disable()
    start = perf_counter()
    loss.backward()
    stop = perf_counter()
    gc.enable()
    return stop - start


@contextmanager
def clocked_hooks(calls: list[float]) -> Iterator[None]:
    """Hooks that are registered meanwhile note in ``calls`` how many seconds each of their calls takes."""
    register = torch.Tensor.register_post_accumulate_grad_hook
    clock = clock_cost()

    def registered(parameter: Any, hook: Callable[[Any], object]) -> Any:
        return register(parameter, clocked(hook, calls, clock))

    torch.Tensor.register_post_accumulate_grad_hook = registered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.register_post_accumulate_grad_hook = register  # type: ignore[method-assign]


def clocked(hook: Callable[[Any], object], calls: list[float], clock: float) -> Callable[[Any], None]:
    """The hook, with a clock around it."""

    def call(parameter: Any) -> None:
        start = perf_counter()
        hook(parameter)
        calls.append(perf_counter() - start - clock)

    return call


def clock_cost() -> float:
    """What the clock shows around a function that does nothing."""
    calls: list[float] = []
    nothing = clocked(lambda parameter: None, calls, 0.0)
    for _ in range(1000):
        nothing(None)
    return float(np.median(calls))


def line(record: dict[str, Any]) -> str:
    """A variant's line of the table."""
    shown = "".join(
        common.quartiles(record[part], 2, width, 8)
        for part, width in (("call", 10), ("parameter", 12), ("backward", 12))
    )
    return f" {record['variant']:<10}{record['calls']:>7g}{shown}"


if __name__ == "__main__":
    main()
