"""An elastic training with Keras 3 on any of its backends: ``fit``, whose callbacks commit, on handwritten digits.

    KERAS_BACKEND=jax collectivesrun -np 2 --min-np 1 python examples/keras/keras_elastic.py --kill-at 1

Kill a rank yourself, or have rank 1 killed in an epoch: the other returns to the last commit and goes on alone; another
process is started, and takes part as soon as it is ready.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

import collectives.keras as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="elastic Keras digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=6, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate")
    parser.add_argument("--commit-every", type=int, default=5, metavar="N", help="batches from commit to commit")
    parser.add_argument("--kill-at", type=int, metavar="EPOCH", help="have the first rank 1 killed in this epoch")
    return parser.parse_args()


class Death(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Kills this process in the middle of an epoch."""

    def __init__(self, state: Any, epoch: int) -> None:
        super().__init__()
        self._state, self._epoch = state, epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (self._state.epoch, batch) == (self._epoch, 7):
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    args = arguments()
    hvd.init()
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32)
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(args.lr, momentum=0.9))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        own = slice(hvd.rank(), None, hvd.size())  # of the ranks that there are now
        callbacks = [
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=args.commit_every),
        ]
        if args.kill_at is not None and os.environ.get("COLLECTIVES_MEMBER") == "1":
            callbacks.append(Death(state, args.kill_at))
        model.fit(
            pictures[own][: 1792 // hvd.size()],  # equally many on all ranks
            labels[own][: 1792 // hvd.size()],
            batch_size=args.batch_size,
            initial_epoch=state.epoch,
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )

    train(state)
    hvd.check_consistency([np.asarray(weight) for weight in model.get_weights()])
    if hvd.rank() == 0:
        print(f"All {hvd.size()} ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
