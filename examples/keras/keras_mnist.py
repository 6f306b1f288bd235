"""Keras with ``compile`` and ``fit`` on any of its backends: ``DistributedOptimizer`` and callbacks, on handwritten
digits.

    collectivesrun -np 2 python examples/keras/keras_mnist.py
    KERAS_BACKEND=jax collectivesrun -np 2 python examples/keras/keras_mnist.py
    KERAS_BACKEND=torch collectivesrun -np 2 python examples/keras/keras_mnist.py

The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded.
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Keras digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate of one rank")
    parser.add_argument(
        "--dropout", type=float, default=0.25, metavar="P", help="share of what is dropped while training"
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="have all ranks begin alike; without it, all get rank 0's parameters"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument(
        "--checkpoint-format", metavar="PATH", help="such as ./checkpoint-{epoch}.keras; without it none is written"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def pin_gpu() -> None:
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


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pictures (n, 8, 8, 1) scaled to 0..1 and labels (n, 10), for training and for testing; the same on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = keras.utils.to_categorical(labels[order], 10)
    return pictures[:1408], labels[:1408], pictures[1408:], labels[1408:]


def new_model(dropout: float) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="elu"),
            layers.Conv2D(32, 3, activation="elu"),
            layers.AveragePooling2D(2),
            layers.Dropout(dropout),
            layers.Flatten(),
            layers.Dense(64, activation="elu"),
            layers.Dropout(dropout),
            layers.Dense(10, activation="softmax"),
        ]
    )


class Throughput(keras.callbacks.Callback):  # type: ignore[misc]
    """A callback of one's own: the pictures that all ranks together train with in a second, epoch by epoch."""

    def __init__(self, pictures: int) -> None:
        super().__init__()
        self.pictures = pictures
        self.begin = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.begin = perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}: {self.pictures / (perf_counter() - self.begin):.1f} images/s", flush=True)


def main() -> Any:
    """Train; returns the model."""
    args = arguments()
    hvd.init()
    pin_gpu()
    if args.seed is not None:
        keras.utils.set_random_seed(args.seed)

    x_train, y_train, x_test, y_test = digits()
    model = new_model(args.dropout)
    # Averaging over more ranks makes steps surer, so that they may be longer.
    opt = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
    opt = hvd.DistributedOptimizer(
        opt,
        backward_passes_per_step=1,
        average_aggregated_gradients=True,
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    model.compile(loss="categorical_crossentropy", optimizer=opt, metrics=["accuracy"])

    callbacks = [
        # All begin with rank 0's parameters, drawn at random or loaded.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before the callbacks that look at metrics.
        hvd.callbacks.MetricAverageCallback(),
        Throughput(len(x_train)),
    ]
    # On rank 0 only, or the ranks would write into each other's files.
    if hvd.rank() == 0 and args.checkpoint_format:
        callbacks.append(keras.callbacks.ModelCheckpoint(args.checkpoint_format))

    # Each rank has its part, in an order that was drawn once: the batches of all ranks make the batch of one rank
    # alone.
    mine = slice(hvd.rank(), None, hvd.size())
    model.fit(
        x_train[mine],
        y_train[mine],
        batch_size=args.batch_size,
        shuffle=False,
        callbacks=callbacks,
        epochs=args.epochs,
        verbose=2 if hvd.rank() == 0 else 0,
        validation_data=(x_test, y_test),
    )

    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    hvd.check_consistency(model.get_weights())
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
        print("All ranks hold the same parameters", flush=True)
    return model


if __name__ == "__main__":
    main()
