"""Images per second in data-parallel training with TensorFlow 2, on random pictures.

    collectivesrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py
    collectivesrun -np 2 python examples/tensorflow2/tensorflow2_synthetic_benchmark.py --model ResNet50 --batch-size 8

A model is any of keras.applications, by its name there; ``small`` is a network of a few convolutions, for machines
without a GPU.
"""

from __future__ import annotations

import argparse
import timeit
from typing import Any

import numpy as np
import tensorflow as tf

import collectives.tensorflow as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TensorFlow 2 synthetic benchmark", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--model", help="default: ResNet50 on a GPU, else small", default=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, default=32, help="images in a batch of one rank")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches before the clock is started")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches in one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    args = parser.parse_args()
    gpus = tf.config.list_physical_devices("GPU")
    args.cuda = bool(gpus) and not args.no_cuda
    args.model = getattr(args, "model", "ResNet50" if args.cuda else "small")
    return args


def pin_gpu(args: argparse.Namespace) -> None:
    """Give this rank one GPU, the one of its number on this host."""
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)] if args.cuda else [], "GPU")


def new_model(name: str) -> tuple[Any, int]:
    """A model of 1,000 classes, not yet trained, and the side of its pictures in pixels."""
    if name != "small":
        model = getattr(tf.keras.applications, name)(weights=None)
        return model, model.input_shape[1]
    layers = tf.keras.layers
    parts: list[Any] = [layers.Input((32, 32, 3))]
    for channels in (16, 32, 64, 128):
        parts += [
            layers.Conv2D(channels, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
        ]
    return tf.keras.Sequential([*parts, layers.GlobalAveragePooling2D(), layers.Dense(1000, activation="softmax")]), 32


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> Any:
    """Measure; returns the model."""
    args = arguments()
    hvd.init()
    pin_gpu(args)

    model, pixels = new_model(args.model)
    opt = tf.optimizers.SGD(0.01)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    data = tf.random.uniform([args.batch_size, pixels, pixels, 3])
    target = tf.random.uniform([args.batch_size, 1], minval=0, maxval=999, dtype=tf.int64)
    loss = tf.losses.SparseCategoricalCrossentropy()

    @tf.function  # type: ignore[untyped-decorator]
    def benchmark_step(first_batch: bool) -> None:
        with tf.GradientTape() as tape:
            loss_value = loss(target, model(data, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(gradients, model.trainable_variables))  # noqa: B905
        # After the first step, because only then does the optimizer have its variables.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)

    kind = "GPU" if args.cuda else "CPU"
    log(f"Model: {args.model}")
    log(f"Parameters: {model.count_params()}")
    log(f"Batch size: {args.batch_size}")
    log(f"Number of {kind}s: {hvd.size()}")
    with tf.device(kind):
        log("Running warmup...")
        benchmark_step(first_batch=True)
        timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_warmup_batches)
        log("Running benchmark...")
        rates = []
        for iteration in range(args.num_iters):
            seconds = timeit.timeit(lambda: benchmark_step(first_batch=False), number=args.num_batches_per_iter)
            rates.append(args.batch_size * args.num_batches_per_iter / seconds)
            log(f"Iter #{iteration}: {rates[-1]:.1f} img/sec per {kind}")
    # The mean over the ranks, measurement by measurement.
    found = hvd.allreduce(tf.constant(rates, tf.float64), name="img_sec").numpy()
    mean, interval = np.mean(found), 1.96 * np.std(found)
    log(f"Img/sec per {kind}: {mean:.1f} +-{interval:.1f}")
    log(f"Total img/sec on {hvd.size()} {kind}(s): {hvd.size() * mean:.1f} +-{hvd.size() * interval:.1f}")
    # What is not trainable are the means and variances of each rank's own batches.
    hvd.check_consistency([variable.numpy() for variable in model.trainable_variables])
    log("All ranks hold the same parameters")
    return model


if __name__ == "__main__":
    main()
