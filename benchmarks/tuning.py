"""The autotuner from a bad start: ``collectivesrun -np 2 python -m benchmarks.tuning``.

Three worlds in one process, over the same ranks: one that tunes itself, one with the defaults, which were tuned by
hand, and one that stays as badly set as the first began. The first makes training steps until it has chosen; then all
three take turns step by step. In one process, because two runs an hour apart on a shared machine differ by more than
what is to be seen here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.gradients import Gradients
from benchmarks.models import MODELS
from collectives.base.config import ALGORITHMS, Config
from collectives.tools.bench import cli
from collectives.tools.bench.measure import Summary, alternate
from collectives.tools.bench.ranks import Ranks, session
from collectives.transport.mpi import mpi_groups
from collectives.worlds.world import World

TUNED, DEFAULTS, START = "tuned", "defaults", "start"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(
        prog="benchmarks.tuning", description="What the autotuner reaches from a bad start, against the defaults."
    )
    flags.add_argument("--model", choices=tuple(MODELS), default="resnet50", help="whose gradients")
    flags.add_count("-n", "--steps", default=40, help="steps while it tunes")
    flags.add_count("-m", "--rounds", default=20, help="rounds of the final comparison")
    flags.add_argument(
        "--threshold", type=cli.size, default="1M", metavar="SIZE", help="fusion threshold to begin with"
    )
    flags.add_argument("--algorithm", choices=ALGORITHMS, default="native", help="algorithm to begin with")
    flags.add_count("--sample", default=1, help="steps of a sample; one more is discarded")
    flags.add_count("--samples", default=18, help="samples until it has chosen")
    flags.add_json()
    options = flags.parse_args(arguments)
    with session() as ranks:
        if ranks.size == 1:
            ranks.say("# one rank alone has nothing to tune")
            return
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "tuning", "milliseconds per step", content)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """Tune, then compare; rank 0 prints it."""
    defaults = Config.from_environment()
    start = replace(defaults, fusion_threshold=options.threshold, algorithm=options.algorithm)
    gradients = Gradients(MODELS[options.model](), ranks.rank, ranks.size)
    gradients.clear()
    with ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "autotune.csv"
        tuned = replace(
            defaults,
            autotune_steps=options.sample,
            autotune_warmup=1,
            autotune_samples=options.samples,
            autotune_log=str(log) if ranks.rank == 0 else "",
        )
        steps = {}
        for name, config in ((TUNED, tuned), (DEFAULTS, defaults), (START, start)):
            world = World(mpi_groups.connect(ranks.comm, config), config)
            stack.callback(world.shutdown)
            if name == TUNED:
                world.tune(fusion_threshold=options.threshold, algorithm=options.algorithm)
            steps[name] = step_of(world, gradients)
        ranks.say(
            f"# gradients of {options.model}, {ranks.size} ranks; begins with {options.algorithm}, fusion threshold "
            f"{options.threshold}"
        )
        tuning = alternate(ranks, [steps[TUNED]], 0, options.steps)[0] * 1e3
        ranks.say("# milliseconds per step while it tunes, ten a line; the median in front")
        ranks.say(lines_of(tuning, 10))
        settings = log.read_text().splitlines() if ranks.rank == 0 and log.exists() else []
        ranks.say("# the autotuner's log:\n" + "\n".join(f"#   {line}" for line in settings or ["(none)"]))
        seconds = alternate(ranks, list(steps.values()), 3, options.rounds)
    times = dict(zip(steps, seconds * 1e3, strict=True))
    records = []
    ranks.say(f"# then, {options.rounds} rounds in turn")
    ranks.say(f"#{'world':<10}{'ms':>10}{'p25':>10}{'p75':>10}{'x defaults':>12}{'p25':>8}{'p75':>8}")
    for name, row in times.items():
        time, ratio = Summary.of(row), Summary.of(row / times[DEFAULTS])
        records.append({"world": name, "time": time.as_dict(), "ratio": ratio.as_dict()})
        ranks.say(f" {name:<10}{common.quartiles(time.as_dict())}{common.quartiles(ratio.as_dict(), 2, 12, 8)}")
    return {
        "model": options.model,
        "start": {"fusion_threshold": options.threshold, "algorithm": options.algorithm},
        "steps": tuning.tolist(),
        "log": settings,
        "records": records,
    }


def step_of(world: World, gradients: Gradients) -> Callable[[], None]:
    """A step of a training in this world."""
    named = list(zip(gradients.names, gradients.tensors, strict=True))

    def step() -> None:
        handles = [world.allreduce_async_(tensor, average=False, name=name) for name, tensor in named]
        for handle in handles:
            world.synchronize(handle)

    return step


def lines_of(times: np.ndarray, width: int) -> str:
    """All times, ``width`` of them a line, each line with the number of its first step and its median."""
    rows = [times[start : start + width] for start in range(0, len(times), width)]
    return "\n".join(
        f" {index * width + 1:>6} {float(np.median(row)):>9.2f} |" + "".join(f"{value:>9.2f}" for value in row)
        for index, row in enumerate(rows)
    )


if __name__ == "__main__":
    main()
