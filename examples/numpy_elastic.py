"""An elastic training in plain NumPy: ranks may die, and the loss goes on.

    collectivesrun -np 3 --min-np 2 python examples/numpy_elastic.py

It says which process each rank is: kill one. (Needs scikit-learn, for its digits: 1,797 pictures of 8 x 8 pixels.)
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import collectives as hvd


def main() -> None:
    parser = argparse.ArgumentParser(description="elastic NumPy digits example")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.7, help="that a step lasts longer, as of a larger model")
    options = parser.parse_args()
    hvd.init()
    pictures, labels = load_digits(return_X_y=True)
    pictures, targets = pictures / 16, np.eye(10)[labels]
    state: Any = hvd.elastic.ObjectState(weights=np.zeros((64, 10)), step=1)
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)

    @hvd.elastic.run(recover="retry")
    def train(state: Any) -> None:
        while state.step <= options.steps:
            mine = slice(hvd.rank(), None, hvd.size())
            raised = np.exp(pictures[mine] @ state.weights)
            probability = raised / raised.sum(axis=1, keepdims=True)
            gradient = pictures[mine].T @ (probability - targets[mine]) / len(probability)
            time.sleep(options.seconds)
            loss = -np.log((probability * targets[mine]).sum(axis=1)).mean()
            loss = hvd.allreduce(loss, name="loss")
            state.weights -= 0.5 * hvd.allreduce(gradient, name="gradient")
            if hvd.rank() == 0:
                print(f"step {state.step:2}, {hvd.size()} ranks: loss {loss:.3f}", flush=True)
            state.step += 1
            state.commit()

    train(state)


if __name__ == "__main__":
    main()
