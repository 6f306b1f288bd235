"""``tf.keras`` with ``compile`` and ``fit``: ``DistributedOptimizer`` and Horovod's callbacks, on handwritten digits.

    collectivesrun -np 2 python examples/tensorflow2/tensorflow2_keras_mnist.py
    TF_USE_LEGACY_KERAS=1 collectivesrun -np 2 python examples/tensorflow2/tensorflow2_keras_mnist.py

``tf.keras`` is Keras 3, or with TF_USE_LEGACY_KERAS=1 the Keras 2 of the package tf_keras. The digits are
scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import collectives.tensorflow.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="tf.keras digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=12, metavar="N", help="epochs to train")
    parser.add_argument(
        "--steps-per-epoch", type=int, default=44, metavar="N", help="of one rank alone; more ranks share them"
    )
    parser.add_argument("--lr", type=float, default=0.001, metavar="LR", help="learning rate of one rank")
    parser.add_argument(
        "--warmup-epochs", type=int, default=3, metavar="N", help="epochs in which it grows to that of all ranks"
    )
    parser.add_argument(
        "--dropout", type=float, default=0.25, metavar="P", help="share of what is dropped while training"
    )
    parser.add_argument(
        "--seed", type=int, metavar="S", help="have all ranks begin alike; without it, all get rank 0's parameters"
    )
    parser.add_argument(
        "--checkpoint-format", metavar="PATH", help="such as ./checkpoint-{epoch}.keras; without it none is written"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def pin_gpu(args: argparse.Namespace) -> None:
    """Give this rank one GPU, the one of its number on this host."""
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    if gpus:
        tf.config.set_visible_devices([] if args.no_cuda else gpus[hvd.local_rank() % len(gpus)], "GPU")


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pictures (n, 8, 8, 1) scaled to 0..1 and labels (n,), for training and for testing; the same on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pictures = (pictures[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return pictures[:1408], labels[order][:1408], pictures[1408:], labels[order][1408:]


def new_model(dropout: float) -> Any:
    layers = tf.keras.layers
    return tf.keras.Sequential(
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


def main() -> Any:
    """Train; returns the model."""
    args = arguments()
    hvd.init()
    pin_gpu(args)
    if args.seed is not None:
        tf.keras.utils.set_random_seed(args.seed)

    train_pictures, train_labels, test_pictures, test_labels = digits()
    dataset = tf.data.Dataset.from_tensor_slices((train_pictures, train_labels))
    # The same order everywhere, of which each rank takes its part: the batches of all ranks make the batch of one rank
    # alone.
    dataset = dataset.shuffle(len(train_labels), seed=1).repeat().shard(hvd.size(), hvd.rank()).batch(args.batch_size)

    model = new_model(args.dropout)
    # Averaging over more ranks makes steps surer, so that they may be longer.
    scaled_lr = args.lr * hvd.size()
    opt = hvd.DistributedOptimizer(
        tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

    callbacks = [
        # All begin with rank 0's parameters, drawn at random or loaded.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        # Before the callbacks that look at metrics.
        hvd.callbacks.MetricAverageCallback(),
    ]
    if args.warmup_epochs:
        callbacks.append(
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=args.warmup_epochs, verbose=1)
        )
    # On rank 0 only, or the ranks would write into each other's files.
    if hvd.rank() == 0 and args.checkpoint_format:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(args.checkpoint_format))

    steps = args.steps_per_epoch // hvd.size()
    verbose = 2 if hvd.rank() == 0 else 0
    model.fit(dataset, steps_per_epoch=steps, callbacks=callbacks, epochs=args.epochs, verbose=verbose)

    # Every rank tests all pictures: there are few, and the ranks hold the same model.
    loss, accuracy = model.evaluate(test_pictures, test_labels, verbose=0)
    hvd.check_consistency(model.get_weights())
    if hvd.rank() == 0:
        print(f"Test set: Average loss: {loss:.4f}, Accuracy: {100 * accuracy:.2f}%", flush=True)
        print("All ranks hold the same parameters", flush=True)
    return model


if __name__ == "__main__":
    main()
