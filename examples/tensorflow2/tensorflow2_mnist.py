"""TensorFlow 2 with a training loop of its own: ``tf.function`` and ``DistributedGradientTape``, on handwritten digits.

    collectivesrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py
    collectivesrun -np 2 python examples/tensorflow2/tensorflow2_mnist.py --checkpoint-dir ./checkpoints

The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded. More ranks take fewer steps,
each with the pictures of all ranks and a learning rate that is as many times larger.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import collectives.tensorflow as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TensorFlow 2 digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="steps of one rank alone; more ranks share them"
    )
    parser.add_argument("--lr", type=float, default=0.001, metavar="LR", help="learning rate of one rank")
    parser.add_argument(
        "--dropout", type=float, default=0.25, metavar="P", help="share of what is dropped while training"
    )
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="steps between two lines of the log")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="have all ranks begin alike; without it, all get rank 0's parameters"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="where rank 0 saves the model; without it nothing is saved"
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


def accuracy(model: Any, pictures: np.ndarray, labels: np.ndarray) -> float:
    """The share of pictures that the model knows; every rank looks at its part of them."""
    guesses = model(pictures[hvd.rank() :: hvd.size()], training=False).numpy().argmax(axis=1)
    right = int((guesses == labels[hvd.rank() :: hvd.size()]).sum())
    return int(hvd.allreduce(tf.constant(right), op=hvd.Sum, name="right")) / len(labels)


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
    loss = tf.losses.SparseCategoricalCrossentropy()
    opt = tf.optimizers.Adam(args.lr * hvd.size())
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)

    @tf.function  # type: ignore[untyped-decorator]
    def training_step(pictures: Any, labels: Any, first_batch: bool) -> Any:
        with tf.GradientTape() as tape:
            loss_value = loss(labels, model(pictures, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        grads = tape.gradient(loss_value, model.trainable_variables)
        opt.apply_gradients(zip(grads, model.trainable_variables))  # noqa: B905
        # After the first step, because only then does the optimizer have its variables.
        if first_batch:
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(opt.variables, root_rank=0)
        return loss_value

    for batch, (pictures, labels) in enumerate(dataset.take(args.steps // hvd.size())):
        loss_value = training_step(pictures, labels, batch == 0)
        if batch % args.log_interval == 0 and hvd.rank() == 0:
            print(f"Step #{batch}\tLoss: {float(loss_value):.6f}", flush=True)

    found = accuracy(model, test_pictures, test_labels)
    if hvd.rank() == 0:
        print(f"Test set: Accuracy: {100 * found:.2f}%", flush=True)
        if args.checkpoint_dir:
            checkpoint.save(os.path.join(args.checkpoint_dir, "digits"))
    hvd.check_consistency(model.get_weights())
    if hvd.rank() == 0:
        print("All ranks hold the same parameters", flush=True)
    return model


if __name__ == "__main__":
    main()
