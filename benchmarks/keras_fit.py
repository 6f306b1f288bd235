"""Keras ``fit``: ``KERAS_BACKEND=tensorflow collectivesrun -np 2 python -m benchmarks.keras_fit``.

What does communication add to a step of ``model.fit``? The contestants train the same network on the same batch, and
take turns fit by fit:

    alone          Keras 3 with a plain optimizer: every rank for itself
    collectives    Keras 3 with our DistributedOptimizer
    legacy         tf_keras (Keras 2) with a plain optimizer
    strategy       tf_keras in a MultiWorkerMirroredStrategy, rings over gRPC: Keras 3 has none for several workers

What ours adds is its time minus that of ``alone`` in the same round, and what the strategy adds its time minus that of
``legacy``. On the JAX and torch backends only the first two run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.tf_strategy import strategy
from collectives.tools.bench import cli
from collectives.tools.bench.measure import OURS, Summary
from collectives.tools.bench.ranks import Ranks, session

ALONE, LEGACY, STRATEGY = "alone", "legacy", "strategy"
BASES = {OURS: ALONE, STRATEGY: LEGACY}
"""Whose time is subtracted."""
WIDTHS = {"small": (64, 64, 64), "medium": (1024, 1024), "large": (2048, 2048, 2048)}
"""Hidden layers between 784 inputs and 10 classes: 0.06, 1.9 and 10 million parameters."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print, on rank 0."""
    flags = cli.Parser(prog="benchmarks.keras_fit", description="What communication adds to a step of Keras's fit.")
    flags.add_argument("--model", choices=tuple(WIDTHS), default="medium", help="what is trained")
    flags.add_argument("--alone", action="store_true", help="without the strategy")
    flags.add_count("--batch", default=32, help="samples of a rank's batch")
    flags.add_count("--steps", default=20, help="steps of a fit")
    flags.add_count("-n", "--iterations", default=10, help="timed rounds")
    flags.add_count("-w", "--warmup", default=2, help="untimed rounds before them")
    flags.add_json()
    options = flags.parse_args(arguments)
    # On other backends there is no such peer, and TensorFlow may not be there.
    options.peers = (
        (STRATEGY,) if os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow" and not options.alone else ()
    )
    with session() as ranks:
        content = measure(options, ranks)
        common.write_results(options.json, ranks, "keras_fit", "milliseconds per step", content)


def measure(options: Any, ranks: Ranks) -> dict[str, Any]:
    """Time all contestants; rank 0 prints it."""
    with contextlib.ExitStack() as stack:
        # It must be the first to use TensorFlow.
        workers = stack.enter_context(strategy(ranks)) if STRATEGY in options.peers else None
        import keras

        import collectives.keras as hvd

        random = np.random.default_rng(ranks.rank)
        inputs = random.standard_normal((options.batch, 784), np.float32)
        labels = random.integers(0, 10, options.batch)
        widths = WIDTHS[options.model]
        ours, alone = network(keras, widths), network(keras, widths)
        ours.compile(hvd.DistributedOptimizer(plain(keras)), "sparse_categorical_crossentropy")
        # As ours is: XLA compiles no callback.
        alone.compile(plain(keras), "sparse_categorical_crossentropy", jit_compile=ours.jit_compile)
        trained = {ALONE: alone, OURS: ours}
        if workers is not None:
            import tf_keras

            trained[LEGACY] = network(tf_keras, widths)
            trained[LEGACY].compile(plain(tf_keras), "sparse_categorical_crossentropy")
            with workers.scope():
                trained[STRATEGY] = network(tf_keras, widths)
                trained[STRATEGY].compile(plain(tf_keras), "sparse_categorical_crossentropy")
        fits = {name: partial(fit, model, inputs, labels, options.steps) for name, model in trained.items()}
        where = common.place_of(ranks)
        parameters = ours.count_params()
        ranks.say(
            f"# {options.model}: {parameters} parameters; {where}; Keras {keras.__version__} on "
            f"{keras.backend.backend()}"
        )
        ranks.say(
            f"# medians of {options.iterations} fits of {options.steps} steps, the slowest rank's time, milliseconds "
            f"per step"
        )
        seconds = common.time_in_turn(ranks, fits, options.warmup, options.iterations)
    records = summarize({name: row * 1e3 / options.steps for name, row in seconds.items()})
    ranks.say(table(records))
    return {"model": options.model, "parameters": parameters, "records": records}


def network(keras: Any, widths: Sequence[int]) -> Any:
    """The network, of Keras 3 or of tf_keras."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, activation="relu") for width in widths]
    return keras.Sequential([keras.layers.Input((784,)), *layers, keras.layers.Dense(10, activation="softmax")])


def plain(keras: Any) -> Any:
    """The same optimizer for everybody."""
    return keras.optimizers.SGD(0.001)


def fit(model: Any, inputs: np.ndarray, labels: np.ndarray, steps: int) -> None:
    """So many steps on the same batch."""
    if model.__module__.startswith("tf_keras"):
        import tensorflow as tf

        sharded = tf.data.Options()
        sharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        data = tf.data.Dataset.from_tensors((inputs, labels)).repeat(steps).with_options(sharded)
        model.fit(data, epochs=1, steps_per_epoch=steps, verbose=0)
    else:
        many = np.broadcast_to(inputs, (steps, *inputs.shape)).reshape(-1, 784)
        model.fit(many, np.tile(labels, steps), batch_size=len(inputs), epochs=1, shuffle=False, verbose=0)


def summarize(times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """From the milliseconds of all rounds: each contestant's step, and what it adds to its base's."""
    records = []
    for name, row in times.items():
        added = Summary.of(row - times[BASES[name]]) if name in BASES else None
        records.append({"contestant": name, "time": Summary.of(row).as_dict(), "added": added and added.as_dict()})
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """A line per contestant, and ours against theirs."""
    lines = [
        f"#{'contestant':<12}" + "".join(f"{head:>10}" for head in ("step ms", "p25", "p75", "adds ms", "p25", "p75"))
    ]
    for record in records:
        lines.append(
            f" {record['contestant']:<12}{common.quartiles(record['time'])}{common.quartiles(record['added'])}"
        )
    added = {record["contestant"]: record["added"]["median"] for record in records if record["added"]}
    if STRATEGY in added and added[STRATEGY] > 0:
        lines.append(f"# {OURS} adds {added[OURS] / added[STRATEGY]:.2f} of what {STRATEGY} adds")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
