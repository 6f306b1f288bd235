"""All gradients of a step in TensorFlow: ``collectivesrun -np 2 python -m benchmarks.tf_step --model large``.

Inside ``tf.function``, the tensors of a model are summed over the ranks. The contestants take turns call by call:

    collectives    collectives.tensorflow.grouped_allreduce, inside tf.function
    engine         the same tensors as NumPy arrays in collectives.grouped_allreduce: without TensorFlow
    function       the same tf.function with tf.identity in place of the all-reduce: what is left when we are taken away
    strategy       tf.distribute.MultiWorkerMirroredStrategy, rings over gRPC, inside tf.function
    memcpy         one copy of as many bytes on every rank: the least that an all-reduce moves

``beyond`` is what our way into and out of the graph costs: the time of ``collectives`` minus those of ``engine`` and
``function`` in the same round.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import collectives
from benchmarks import common, models
from benchmarks.tf_strategy import strategy, sum_of
from collectives.tools.bench import cli, report
from collectives.tools.bench.collective import FLOOR, floor
from collectives.tools.bench.measure import OURS, Summary
from collectives.tools.bench.ranks import Ranks, session

ENGINE, FUNCTION, STRATEGY = "engine", "function", "strategy"
PEERS = (STRATEGY, FLOOR)


def large() -> models.Shapes:
    """25 gradients of 1,000,000 elements."""
    return {f"parameter{index}": (1_000_000,) for index in range(25)}


def tiny() -> models.Shapes:
    """200 gradients of 64 elements."""
    return {f"parameter{index}": (64,) for index in range(200)}


def one() -> models.Shapes:
    """One element: nothing but the call."""
    return {"parameter": (1,)}


SHAPES: dict[str, Callable[[], models.Shapes]] = {"large": large, "resnet50": models.resnet50, "tiny": tiny, "one": one}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0; wrong sums end the process with status 1."""
    flags = cli.Parser(prog="benchmarks.tf_step", description="An all-reduce of all gradients inside tf.function.")
    flags.add_argument("--model", choices=tuple(SHAPES), default="large", help="whose gradients")
    flags.add_names("--peers", "peer", PEERS, default=PEERS, help=", ".join(PEERS))
    flags.add_count("-n", "--iterations", default=20, help="timed rounds")
    flags.add_count("-w", "--warmup", default=5, help="untimed rounds before them", least=0)
    flags.add_json()
    options = flags.parse_args(arguments)
    with session() as ranks:
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "tf_step", "milliseconds", content)
    if any(record["wrong"] for record in content["records"]):
        sys.exit(1)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time all contestants; rank 0 prints it."""
    with contextlib.ExitStack() as stack:
        # It must be the first to use TensorFlow.
        workers = stack.enter_context(strategy(ranks)) if STRATEGY in options.peers else None
        import tensorflow as tf

        import collectives.tensorflow as hvd

        shapes = SHAPES[options.model]()
        arrays = [np.full(shape, index % 7 + ranks.rank, np.float32) for index, shape in enumerate(shapes.values())]
        tensors = [tf.constant(array) for array in arrays]
        calls: dict[str, Any] = {
            OURS: tf.function(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="gradients")),
            ENGINE: lambda: collectives.grouped_allreduce(arrays, op=collectives.Sum, name="gradients of the engine"),
        }
        if workers is not None:
            calls[STRATEGY] = tf.function(lambda: sum_of(workers, tensors))
        machine = report.machine()
        nbytes = sum(array.nbytes for array in arrays)
        where = f"{ranks.size} ranks, each on {machine['usable_cores']} of {machine['cores']} cores"
        ranks.say(
            f"# {options.model}: {len(arrays)} float32 tensors, {nbytes / 1e6:.3f} MB; {where}; TensorFlow "
            f"{tf.__version__}"
        )
        ranks.say(f"# medians of {options.iterations} rounds, the slowest rank's time, milliseconds")
        unchanged = tf.function(lambda: [tf.identity(tensor) for tensor in tensors])
        expected = [index % 7 * ranks.size + sum(range(ranks.size)) for index in range(len(arrays))]
        wrong = {name: ranks.total(differing(call(), expected)) for name, call in calls.items()}
        calls[FUNCTION] = unchanged
        unchanged()
        if FLOOR in options.peers:
            source = np.ones(nbytes // 4, np.float32)
            calls[FLOOR] = floor(source, np.ones_like(source), nbytes)
        seconds = common.time_in_turn(ranks, calls, options.warmup, options.iterations)
    records = summarize({name: row * 1e3 for name, row in seconds.items()}, wrong)
    ranks.say(table(records))
    return {"model": options.model, "tensors": len(arrays), "bytes": nbytes, "records": records}


def differing(results: Sequence[Any], expected: Sequence[float]) -> int:
    """How many elements are not what they should be."""
    return sum(
        int(np.count_nonzero(np.asarray(tensor) != number)) for tensor, number in zip(results, expected, strict=True)
    )


def summarize(times: dict[str, np.ndarray], wrong: dict[str, int]) -> list[dict[str, Any]]:
    """From milliseconds: each contestant's time, its ratio to ours, and what ours takes beyond its parts."""
    return [
        {
            "contestant": name,
            "time": Summary.of(row).as_dict(),
            "beyond": Summary.of(row - times[ENGINE] - times[FUNCTION]).as_dict() if name == OURS else None,
            "ratio": Summary.of(row / times[OURS]).as_dict() if name != OURS else None,
            "wrong": wrong.get(name),
        }
        for name, row in times.items()
    ]


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per contestant."""
    lines = [f"#{'contestant':<12}{'ms':>10}{'p25':>10}{'p75':>10}{'beyond':>10}{'times ours':>12}{'#wrong':>8}"]
    for record in records:
        beyond, ratio = record["beyond"], record["ratio"]
        cells = common.quartiles(record["time"])
        cells += f"{beyond['median']:>10.3f}" if beyond else f"{'-':>10}"
        cells += f"{ratio['median']:>12.2f}" if ratio else f"{'-':>12}"
        lines.append(f" {record['contestant']:<12}{cells}{'N/A' if record['wrong'] is None else record['wrong']:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
