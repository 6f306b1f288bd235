"""A training as they are run on clusters, in seven blocks, with Keras.

    mpirun -n 2 python examples/hpc/hpc_keras.py
    KERAS_BACKEND=jax srun -n 64 python examples/hpc/hpc_keras.py --global-batch-size 1024

Whatever the number of ranks, they work on the same batches and so come to the same model, to rounding; only the time
differs. The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys
from time import perf_counter
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

if "--no-cuda" in sys.argv:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before Keras looks for GPUs

import keras

import collectives.keras as hvd

SIZE = 1408
"""Pictures to train with; the rest is to test with."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Keras on a cluster", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--global-batch-size", type=int, default=64, metavar="N", help="pictures in a batch of all ranks together"
    )
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.05, metavar="LR", help="learning rate, for the global batch")
    parser.add_argument("--seed", type=int, default=42, metavar="S", help="random seed")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def pin_accelerator() -> None:
    """Give this rank one GPU, the one of its number on this host, in the way of the framework below Keras."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        gpus = tf.config.list_physical_devices("GPU")
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
        if gpus:
            tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    elif keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank()))
    else:
        import torch

        if torch.cuda.is_available():
            torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())


class Shard(keras.utils.PyDataset):  # type: ignore[misc]
    """This rank's part of every batch, in another order in each epoch; the parts of all ranks make the batch."""

    def __init__(self, pictures: np.ndarray, labels: np.ndarray, batch_size: int) -> None:
        super().__init__()
        self.pictures, self.labels, self.batch_size = pictures, labels, batch_size
        self.epoch = -1
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self.epoch += 1
        self.order = np.random.default_rng(self.epoch).permutation(len(self.labels))

    def __len__(self) -> int:
        return len(self.labels) // self.batch_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        mine = self.order[index * self.batch_size :][: self.batch_size][hvd.rank() :: hvd.size()]
        return self.pictures[mine], self.labels[mine]


def new_model() -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="elu"),
            layers.Conv2D(32, 3, activation="elu"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(64, activation="elu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds from the end of the first epoch, in which everything is compiled, to the end of the last."""

    seconds = 0.0

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch == 0:
            self.begin = perf_counter()
        self.seconds = perf_counter() - self.begin


def log(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> Any:
    """Train; returns the model."""
    args = arguments()

    # 1. Initialise: who am I, and how many are we?
    hvd.init()

    # 2. Adapt the batch of a rank to that of all ranks, which decides what is learned.
    local_batch_size, left = divmod(args.global_batch_size, hvd.size())
    if left:
        raise SystemExit(f"--global-batch-size {args.global_batch_size} cannot be divided by {hvd.size()} ranks")
    log(f"{hvd.size()} ranks on {hvd.cross_size()} hosts, {local_batch_size} of {args.global_batch_size} pictures each")

    # 3. Pin the accelerator: one for each rank of a host.
    pin_accelerator()

    # 4. Shard the data.
    data, target = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(target))
    pictures, labels = (data[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1), target[order]
    shard = Shard(pictures[:SIZE], labels[:SIZE], args.global_batch_size)

    # 5. Build the model and its optimizer, alike on every rank.
    keras.utils.set_random_seed(args.seed)
    model = new_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9))
    model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])

    # 6. Train, and take the time.
    clock = Clock()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), clock]
    # Without shuffle=False, Keras would exchange batches, and not alike on all ranks.
    model.fit(shard, epochs=args.epochs, shuffle=False, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0)

    # 7. Evaluate: how fast, how good?
    accuracy = model.evaluate(pictures[SIZE:], labels[SIZE:], verbose=0)[1]
    log(f"Time to train: {clock.seconds:.2f} s")
    if args.epochs > 1:
        log(f"Throughput: {(args.epochs - 1) * len(shard) * args.global_batch_size / clock.seconds:.1f} images/s")
    log(f"Test accuracy: {100 * accuracy:.2f}%")
    hvd.check_consistency(model.get_weights())
    log("All ranks hold the same parameters")
    return model


if __name__ == "__main__":
    main()
