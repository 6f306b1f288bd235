"""Training steps in torch: ``collectivesrun -np 2 python -m benchmarks.torch_step --model resnet50``.

What does communication add to a step (forward, backward, optimizer)? The contestants train copies of one model on the
same input, and take turns step by step:

    alone               a plain optimizer: every rank for itself
    collectives         our DistributedOptimizer
    collectives-view    the same with gradient_as_bucket_view=True
    ddp                 torch's DistributedDataParallel over gloo, with its default buckets
    ddp-view            the same with gradient_as_bucket_view=True
    ddp-hook            DistributedDataParallel with our communication hook
    ddp-ours            DistributedDataParallel over our backend of torch.distributed
    fsdp, fsdp-ours     the model sharded by fully_shard, over gloo and over our backend
    memcpy              one copy of as many bytes as all gradients have, on every rank: no step, but the least that an
                        all-reduce moves

What a contestant adds in a round is its step's time minus that of ``alone`` in the same round. It is compared with what
``ddp`` adds, and that of ``fsdp-ours`` with ``fsdp``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks import common
from benchmarks.peers import connect_all
from benchmarks.torch_models import MODELS
from collectives.tools.bench import cli
from collectives.tools.bench.collective import FLOOR, floor
from collectives.tools.bench.measure import OURS, Summary
from collectives.tools.bench.ranks import Ranks, session

ALONE, VIEW = "alone", f"{OURS}-view"
PEERS = ("ddp", "ddp-view", "ddp-hook", "ddp-ours", "fsdp", "fsdp-ours", FLOOR)
REFERENCES = {"fsdp": "fsdp", "fsdp-ours": "fsdp"}
"""What a contestant is compared with; the others with ``ddp``."""

_TOLERANCE = 1e-5
"""Of a tensor's largest gradient: the contestants add in different orders."""

Step = Callable[[], object]


@dataclass(frozen=True)
class Contestant:
    """A copy of the model, one training step of it, and where its gradients are afterwards."""

    name: str
    model: Any
    step: Step

    def gradients(self) -> list[Any]:
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient for gradient in gradients]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0; wrong gradients end the process with status 1."""
    flags = cli.Parser(prog="benchmarks.torch_step", description="What communication adds to a training step in torch.")
    flags.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="what is trained")
    flags.add_names("--peers", "peer", PEERS, default=("ddp", "ddp-view", FLOOR), help=", ".join(PEERS))
    flags.add_count("-n", "--steps", default=20, help="timed rounds")
    flags.add_count("-w", "--warmup", default=5, help="untimed rounds before them", least=0)
    flags.add_count("--block", default=1, help="steps of a contestant in a round")
    flags.add_json()
    options = flags.parse_args(arguments)
    torch.set_num_threads(1)
    with session() as ranks:
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "torch_step", "milliseconds per step", content)
    if any(record["wrong"] for record in content["records"]):
        sys.exit(1)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time all contestants' steps, and count what ours does; rank 0 prints it."""
    make, shape = MODELS[options.model]
    torch.manual_seed(0)
    model = make()
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1 + ranks.rank))
    sizes = [parameter.numel() for parameter in model.parameters()]
    contestants = [alone(model, inputs), ours(model, inputs, False), ours(model, inputs, True)]
    of_torch = [name for name in options.peers if name != FLOOR]
    with connect_all(["gloo"] if of_torch else [], ranks) as peers:
        if peers:
            contestants += [of_torch_distributed(name, model, inputs) for name in of_torch]
        where = common.place_of(ranks)
        ranks.say(
            f"# {options.model}: {len(sizes)} float32 tensors, {4 * sum(sizes) / 1e6:.1f} MB; {where}; torch "
            f"{torch.__version__}"
        )
        rounds = f"{options.steps} rounds" + (f" of {options.block} steps" if options.block > 1 else "")
        ranks.say(
            f"# medians of {rounds}, the slowest rank's time; adds = step - {ALONE}, and its quartiles, in the same "
            f"round"
        )
        wrong = check(contestants, ranks)
        steps = {contestant.name: contestant.step for contestant in contestants}
        if FLOOR in options.peers:
            source, target = np.ones(sum(sizes), np.float32), np.ones(sum(sizes), np.float32)
            steps[FLOOR] = floor(source, target, source.nbytes)
        blocks = {name: repeated(step, options.block) for name, step in steps.items()}
        seconds = common.time_in_turn(ranks, blocks, options.warmup, options.steps)
        counted = common.counters_per_step(ranks, contestants[1].step)
    records = summarize({name: row * 1e3 / options.block for name, row in seconds.items()}, wrong)
    ranks.say(table(records))
    shown = ", ".join(f"{name} {value:g}" for name, value in counted.items() if value)
    ranks.say(f"# the engine's counters per step of {OURS}: {shown or 'all 0'}")
    content = {"model": options.model, "tensors": len(sizes), "bytes": 4 * sum(sizes), "block": options.block}
    return {**content, "records": records, "counters_per_step": counted}


def alone(model: Any, inputs: Any) -> Contestant:
    """No communication."""
    model = copy.deepcopy(model)
    return Contestant(ALONE, model, training(model, inputs, plain(model)))


def ours(model: Any, inputs: Any, view: bool) -> Contestant:
    """A user's loop with our optimizer."""
    import collectives.torch as hvd

    model = copy.deepcopy(model)
    optimizer = hvd.DistributedOptimizer(
        plain(model), named_parameters=model.named_parameters(), gradient_as_bucket_view=view
    )
    return Contestant(VIEW if view else OURS, model, training(model, inputs, optimizer))


def of_torch_distributed(name: str, model: Any, inputs: Any) -> Contestant:
    """A user's loop with DistributedDataParallel or fully_shard."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from collectives.torch import ddp

    model = copy.deepcopy(model)
    group: Any = dist.new_group(backend="collectives") if name.endswith("-ours") else dist.group.WORLD
    if name.startswith("fsdp"):
        mesh = DeviceMesh.from_group(group, "cpu")
        for child in model.children():
            if not isinstance(child, torch.nn.ModuleList):  # a container has no forward pass
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Contestant(name, model, training(model, inputs, plain(model)))
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=name == "ddp-view")
    if name == "ddp-hook":
        wrapped.register_comm_hook(ddp.AllreduceState(), ddp.allreduce_hook)
    return Contestant(name, model, training(wrapped, inputs, plain(model)))


def plain(model: Any) -> Any:
    """The optimizer of all contestants; its learning rate of 0 keeps all steps equal."""
    return torch.optim.SGD(model.parameters(), lr=0.0)


def training(model: Any, inputs: Any, optimizer: Any) -> Step:
    """One step as a user writes it."""

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()

    return step


def repeated(step: Step, times: int) -> Step:
    """A call of so many steps."""

    def block() -> None:
        for _ in range(times):
            step()

    return block


def check(contestants: Sequence[Contestant], ranks: Ranks) -> dict[str, int | None]:
    """Wrong gradients of each contestant on all ranks after one step, against the mean of the ranks' own."""
    first, *others = contestants
    first.step()
    expected = [gradient.double().numpy() for gradient in first.gradients()]
    for array in expected:
        ranks.sum(array)
        array /= ranks.size
    wrong: dict[str, int | None] = {first.name: None}
    for contestant in others:
        contestant.step()
        pairs = zip(contestant.gradients(), expected, strict=True)
        wrong[contestant.name] = ranks.total(sum(differing(gradient.numpy(), array) for gradient, array in pairs))
    return wrong


def differing(results: np.ndarray, expected: np.ndarray) -> int:
    """How many elements are not what they should be, to rounding; not a number is wrong."""
    return int(np.sum(~(np.abs(results - expected) <= _TOLERANCE * np.abs(expected).max(initial=0))))


def summarize(times: dict[str, np.ndarray], wrong: dict[str, int | None]) -> list[dict[str, Any]]:
    """From milliseconds: each contestant's step, what it adds to the one alone, and that against its reference's."""
    records: list[dict[str, Any]] = []
    references: dict[str, float] = {
        name: float(np.median(times[name] - times[ALONE])) for name in ("ddp", "fsdp") if name in times
    }
    for name, row in times.items():
        added = None if name == ALONE else Summary.of(row if name == FLOOR else row - times[ALONE])
        reference = references.get(REFERENCES.get(name, "ddp"), 0.0)
        records.append(
            {
                "contestant": name,
                "time": None if name == FLOOR else Summary.of(row).as_dict(),
                "added": added and added.as_dict(),
                # A reference that seems to add nothing is none: too much noise, or too few rounds.
                "of_reference": added.median / reference if added and reference > 0 else None,
                "wrong": wrong.get(name),
            }
        )
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per contestant: its step, what it adds, and the ratio to what its reference adds."""
    width = max(len(record["contestant"]) for record in records)
    heads = "".join(f"{head:>10}" for head in ("step ms", "p25", "p75", "adds ms", "p25", "p75"))
    lines = [f"#{'contestant':<{width}}{heads}{'of ref.':>9}{'#wrong':>8}"]
    for record in records:
        ratio = "-" if record["of_reference"] is None else f"{record['of_reference']:.2f}"
        wrong = "N/A" if record["wrong"] is None else record["wrong"]
        times = common.quartiles(record["time"]) + common.quartiles(record["added"])
        lines.append(f" {record['contestant']:<{width}}{times}{ratio:>9}{wrong:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
