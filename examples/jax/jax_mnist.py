"""JAX: a training step under ``jax.jit``, whose gradients all ranks combine in one call, on handwritten digits.

    collectivesrun -np 2 python examples/jax/jax_mnist.py

The digits are scikit-learn's (1,797 pictures of 8 x 8 pixels), so nothing is downloaded.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import collectives.jax as hvd

SIZE = 1408
"""Pictures to train with; the rest is to test with."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="JAX digits example", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures in a batch of one rank")
    parser.add_argument("--epochs", type=int, default=10, metavar="N", help="epochs to train")
    parser.add_argument("--lr", type=float, default=0.025, metavar="LR", help="learning rate of one rank")
    parser.add_argument(
        "--seed", type=int, metavar="S", help="have all ranks begin alike; without it, all get rank 0's parameters"
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in half precision")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 8, 8, 1) scaled to 0..1 and labels (n,), in an order that is the same on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    return (pictures[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels[order]


def new_parameters(key: jax.Array) -> dict[str, jax.Array]:
    """Random first weights (He), zero biases."""
    shapes = {"convolution": (3, 3, 1, 16), "hidden": (6 * 6 * 16, 64), "output": (64, 10)}
    parameters = {}
    for (name, shape), own in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
        parameters[f"{name}.weight"] = jax.random.normal(own, shape) * np.sqrt(2 / np.prod(shape[:-1]))
        parameters[f"{name}.bias"] = jnp.zeros(shape[-1])
    return parameters


def forward(parameters: dict[str, jax.Array], pictures: jax.Array) -> jax.Array:
    """The score of each of the ten digits, (n, 10)."""
    numbers = ("NHWC", "HWIO", "NHWC")
    hidden = jax.lax.conv_general_dilated(
        pictures, parameters["convolution.weight"], (1, 1), "VALID", dimension_numbers=numbers
    )
    hidden = jax.nn.elu(hidden + parameters["convolution.bias"]).reshape(len(pictures), -1)
    hidden = jax.nn.elu(hidden @ parameters["hidden.weight"] + parameters["hidden.bias"])
    return hidden @ parameters["output.weight"] + parameters["output.bias"]


def loss_of(parameters: dict[str, jax.Array], pictures: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(forward(parameters, pictures), labels).mean()


def main() -> Any:
    """Train; returns the parameters."""
    args = arguments()
    hvd.init()
    # One GPU for each rank, the one of its number on this host; before JAX is used for the first time.
    if args.no_cuda:
        jax.config.update("jax_platforms", "cpu")
    else:
        jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank()))

    pictures, labels = digits()
    parameters = new_parameters(jax.random.key(hvd.rank() if args.seed is None else args.seed))
    parameters = hvd.broadcast_parameters(parameters, root_rank=0)
    # Averaging over more ranks makes steps surer, so that they may be longer.
    optimizer = hvd.DistributedOptimizer(
        optax.sgd(args.lr * hvd.size(), momentum=0.9),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Any, state: Any, pictures: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, pictures, labels)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    together = args.batch_size * hvd.size()
    for epoch in range(args.epochs):
        # The same order everywhere, of which each rank takes its part.
        order = np.random.default_rng(epoch).permutation(SIZE)
        for begin in range(0, SIZE - together + 1, together):
            mine = order[begin : begin + together][hvd.rank() :: hvd.size()]
            parameters, state, loss = step(parameters, state, pictures[mine], labels[mine])
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}/{args.epochs}\tLoss: {float(loss):.4f}", flush=True)

    part = slice(SIZE + hvd.rank(), None, hvd.size())
    right = (forward(parameters, jax.device_put(pictures[part])).argmax(axis=1) == labels[part]).sum()
    accuracy = int(hvd.allreduce(right, op=hvd.Sum)) / len(labels[SIZE:])
    hvd.check_consistency(parameters)
    if hvd.rank() == 0:
        print(f"Test set: Accuracy: {100 * accuracy:.2f}%", flush=True)
        print("All ranks hold the same parameters", flush=True)
    return list(parameters.values())


if __name__ == "__main__":
    main()
