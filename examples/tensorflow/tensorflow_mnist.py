"""TensorFlow 1's way, graphs and sessions, through ``tf.compat.v1``: handwritten digits.

    collectivesrun -np 2 python examples/tensorflow/tensorflow_mnist.py
    collectivesrun -np 2 python examples/tensorflow/tensorflow_mnist.py --checkpoint-dir ./checkpoints

The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded. More ranks take fewer steps,
each with the pictures of all ranks and a learning rate that is as many times larger. Started again, the ranks go on
after rank 0's last checkpoint.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import collectives.tensorflow as hvd

tf.disable_v2_behavior()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="TensorFlow 1 digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument(
        "--steps", type=int, default=1000, metavar="N", help="steps of one rank alone; more ranks share them"
    )
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate of one rank")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="have all ranks begin alike; without it, all get rank 0's parameters"
    )
    parser.add_argument(
        "--use-adasum", action="store_true", help="combine what the ranks have learned by Adasum instead of averaging"
    )
    parser.add_argument(
        "--gradient-predivide-factor", type=float, default=1.0, help="divide by this before summing, by the rest after"
    )
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="where rank 0 saves the model; without it nothing is saved"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pictures (n, 64) scaled to 0..1 and labels (n,), for training and for testing; the same on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pictures = (pictures[order] / 16).astype(np.float32)
    return pictures[:1408], labels[order][:1408], pictures[1408:], labels[order][1408:]


def batches(pictures: np.ndarray, labels: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """This rank's part of the batches of all ranks, without end, in another order every time around."""
    random = np.random.default_rng(1)
    together = size * hvd.size()
    while True:
        order = random.permutation(len(labels))
        for begin in range(0, len(labels) - together + 1, together):
            mine = order[begin : begin + together][hvd.rank() :: hvd.size()]
            yield pictures[mine], labels[mine]


def dense(name: str, inputs: Any, units: int) -> Any:
    with tf.variable_scope(name):
        weight = tf.get_variable("weight", [inputs.shape[-1], units], initializer=tf.glorot_uniform_initializer())
        return inputs @ weight + tf.get_variable("bias", [units], initializer=tf.zeros_initializer())


def new_model(pictures: Any) -> Any:
    """The score of each of the ten digits, (n, 10)."""
    with tf.variable_scope("convolution"):
        kernel = tf.get_variable("kernel", [3, 3, 1, 16], initializer=tf.glorot_uniform_initializer())
        hidden = tf.nn.elu(tf.nn.conv2d(tf.reshape(pictures, [-1, 8, 8, 1]), kernel, strides=1, padding="SAME"))
    hidden = tf.nn.avg_pool2d(hidden, ksize=2, strides=2, padding="VALID")
    return dense("output", tf.nn.elu(dense("hidden", tf.reshape(hidden, [-1, 4 * 4 * 16]), 64)), 10)


class AtTheEnd(tf.train.SessionRunHook):  # type: ignore[misc]
    """Evaluate tensors when the training ends, while there still is a session."""

    def __init__(self, tensors: Any, feed: dict[Any, np.ndarray]) -> None:
        self.tensors = tensors
        self.feed = feed
        self.values: Any = None

    def end(self, session: Any) -> None:
        self.values = session.run(self.tensors, self.feed)


def main() -> Any:
    """Train; returns the parameters."""
    args = arguments()
    hvd.init()
    with tf.Graph().as_default():
        return train(args)


def train(args: argparse.Namespace) -> Any:
    if args.seed is not None:
        tf.set_random_seed(args.seed)
    train_pictures, train_labels, test_pictures, test_labels = digits()

    image = tf.placeholder(tf.float32, [None, 64], name="image")
    label = tf.placeholder(tf.int64, [None], name="label")
    scores = new_model(image)
    loss = tf.losses.sparse_softmax_cross_entropy(label, scores)
    accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(scores, 1), label), tf.float32))

    # Averaging over more ranks makes steps surer, so that they may be longer; Adasum chooses their length by itself.
    opt = tf.train.AdagradOptimizer(args.lr * (1 if args.use_adasum else hvd.size()))
    op = hvd.Adasum if args.use_adasum else hvd.Average
    opt = hvd.DistributedOptimizer(opt, op=op, gradient_predivide_factor=args.gradient_predivide_factor)
    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)

    final = AtTheEnd([accuracy, tf.trainable_variables()], {image: test_pictures, label: test_labels})
    hooks = [
        # All begin with rank 0's parameters, drawn at random or from a checkpoint.
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=args.steps // hvd.size()),
        final,
    ]
    if hvd.rank() == 0:
        hooks.append(tf.train.LoggingTensorHook({"step": global_step, "loss": loss}, every_n_iter=10))

    # One GPU for each rank, the one of its number on this host.
    config = tf.ConfigProto(device_count={"GPU": 0} if args.no_cuda else {})
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    # On rank 0 only, or the ranks would write into each other's files.
    checkpoint_dir = args.checkpoint_dir if hvd.rank() == 0 else None
    data = batches(train_pictures, train_labels, args.batch_size)
    with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as session:
        while not session.should_stop():
            pictures, labels = next(data)
            session.run(train_op, feed_dict={image: pictures, label: labels})

    found, parameters = final.values
    hvd.check_consistency(parameters)
    if hvd.rank() == 0:
        print(f"Test set: Accuracy: {100 * found:.2f}%", flush=True)
        print("All ranks hold the same parameters", flush=True)
    return parameters


if __name__ == "__main__":
    tf.logging.set_verbosity(tf.logging.INFO)
    main()
