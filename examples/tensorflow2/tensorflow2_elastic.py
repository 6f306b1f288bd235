"""An elastic training in TensorFlow with a loop of one's own, on handwritten digits: ranks may die and come.

    collectivesrun -np 2 --min-np 1 python examples/tensorflow2/tensorflow2_elastic.py --kill-at 40

Kill a rank yourself, or have rank 1 killed at a step: the other returns to the last commit and goes on alone; another
process is started, and takes part as soon as it is ready. With ``--recover retry`` no step is repeated.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import collectives.tensorflow as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="elastic TensorFlow digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to train")
    parser.add_argument("--lr", type=float, default=0.1, metavar="LR", help="learning rate")
    parser.add_argument("--commit-every", type=int, default=10, metavar="N", help="steps from commit to commit")
    parser.add_argument("--recover", choices=("restore", "retry"), default="restore", help="what survivors do")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="have the first rank 1 killed at this step")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    hvd.init()
    tf.random.set_seed(42)
    is_victim = args.kill_at is not None and os.environ.get("COLLECTIVES_MEMBER") == "1"
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32)
    variables = [
        tf.Variable(tf.random.normal((64, 64), stddev=0.2)),
        tf.Variable(tf.zeros(64)),
        tf.Variable(tf.random.normal((64, 10), stddev=0.2)),
        tf.Variable(tf.zeros(10)),
    ]

    @tf.function  # type: ignore[untyped-decorator]
    def step(pictures: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(pictures @ variables[0] + variables[1])
            scores = hidden @ variables[2] + variables[3]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))
        tape = hvd.DistributedGradientTape(tape)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(args.lr * gradient)
        return loss

    state: Any = hvd.elastic.TensorFlowState(variables, step=0)

    @hvd.elastic.run(recover=args.recover)
    def train(state: Any) -> None:
        while state.step < args.steps:
            # The same order everywhere, of which each of the ranks that there are takes its part.
            order = np.random.default_rng(state.step).permutation(len(labels))[hvd.rank() :: hvd.size()]
            rows = order[: args.batch_size]
            if is_victim and state.step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = step(pictures[rows], labels[rows])
            state.step += 1
            if hvd.rank() == 0 and state.step % 20 == 0:
                print(f"Step: {state.step}\tRanks: {hvd.size()}\tLoss: {float(loss):.4f}", flush=True)
            if state.step % args.commit_every == 0:
                state.commit()

    train(state)
    hvd.check_consistency([variable.numpy() for variable in variables])
    if hvd.rank() == 0:
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
