"""An elastic training in JAX, whose step is compiled, on handwritten digits: ranks may die and come.

    collectivesrun -np 2 --min-np 1 python examples/jax/jax_elastic.py --kill-at 40

Kill a rank yourself, or have rank 1 killed at a step: the other returns to the last commit and goes on alone; another
process is started, and takes part as soon as it is ready.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import collectives.jax as hvd


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="elastic JAX digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps to train")
    parser.add_argument("--lr", type=float, default=0.02, metavar="LR", help="learning rate")
    parser.add_argument("--commit-every", type=int, default=10, metavar="N", help="steps from commit to commit")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="have the first rank 1 killed at this step")
    return parser.parse_args()


def loss_of(parameters: dict[str, jax.Array], pictures: jax.Array, labels: jax.Array) -> jax.Array:
    scores = jax.nn.relu(pictures @ parameters["hidden"]) @ parameters["output"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()


def main() -> None:
    args = arguments()
    hvd.init()
    is_victim = args.kill_at is not None and os.environ.get("COLLECTIVES_MEMBER") == "1"
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32)
    keys = jax.random.split(jax.random.key(42))
    shapes = {"hidden": (64, 64), "output": (64, 10)}
    parameters = {
        name: 0.2 * jax.random.normal(key, shape) for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }
    optimizer = hvd.DistributedOptimizer(optax.sgd(args.lr, momentum=0.9))

    @jax.jit
    def step(parameters: Any, state: Any, pictures: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, pictures, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    state: Any = hvd.elastic.JaxState(parameters=parameters, optimizer=optimizer.init(parameters), step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < args.steps:
            # The same order everywhere, of which each of the ranks that there are takes its part.
            order = np.random.default_rng(state.step).permutation(len(labels))[hvd.rank() :: hvd.size()]
            rows = order[: args.batch_size]
            if is_victim and state.step == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            state.parameters, state.optimizer, loss = step(
                state.parameters, state.optimizer, jnp.asarray(pictures[rows]), jnp.asarray(labels[rows])
            )
            state.step += 1
            if hvd.rank() == 0 and state.step % 20 == 0:
                print(f"Step: {state.step}\tRanks: {hvd.size()}\tLoss: {float(loss):.4f}", flush=True)
            if state.step % args.commit_every == 0:
                state.commit()

    train(state)
    hvd.check_consistency(state.parameters)
    if hvd.rank() == 0:
        print("All ranks hold the same parameters", flush=True)


if __name__ == "__main__":
    main()
