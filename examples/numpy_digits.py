"""Data-parallel training in plain NumPy: handwritten digits, one hidden layer, momentum SGD.

    collectivesrun -np 2 python examples/numpy_digits.py

Every rank holds the same weights and works on its own part of each batch; the gradients are all-reduced, tensor by
tensor, and so every rank takes the same step. Any number of ranks gives the same model, to rounding; one rank needs no
launcher. (Needs scikit-learn, for its digits: 1,797 pictures of 8 x 8 pixels.)
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import collectives

Weights = dict[str, np.ndarray]


def digits(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pictures (n, 64) scaled to 0..1 and labels (n,), for training and for testing; shuffled alike on every rank."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    pictures, labels = (pictures[order] / 16.0).astype(dtype), labels[order]
    return pictures[:1437], labels[:1437], pictures[1437:], labels[1437:]


def new_weights(hidden: int, dtype: np.dtype) -> Weights:
    """Random first weights (He), zero biases."""
    random = np.random.default_rng(2)
    weights = {
        "hidden.weight": random.standard_normal((64, hidden)) * np.sqrt(2 / 64),
        "hidden.bias": np.zeros(hidden),
        "output.weight": random.standard_normal((hidden, 10)) * np.sqrt(2 / hidden),
        "output.bias": np.zeros(10),
    }
    return {name: weight.astype(dtype) for name, weight in weights.items()}


def forward(weights: Weights, pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The hidden layer (n, hidden) and the probability of each digit (n, 10)."""
    hidden = np.maximum(pictures @ weights["hidden.weight"] + weights["hidden.bias"], 0)
    scores = hidden @ weights["output.weight"] + weights["output.bias"]
    raised = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, raised / raised.sum(axis=1, keepdims=True)


def gradients(weights: Weights, pictures: np.ndarray, labels: np.ndarray) -> Weights:
    """The gradients of the cross-entropy, summed over these pictures."""
    hidden, error = forward(weights, pictures)
    error[np.arange(len(labels)), labels] -= 1
    back = (error @ weights["output.weight"].T) * (hidden > 0)
    return {
        "hidden.weight": pictures.T @ back,
        "hidden.bias": back.sum(axis=0),
        "output.weight": hidden.T @ error,
        "output.bias": error.sum(axis=0),
    }


def score(weights: Weights, pictures: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """(mean cross-entropy, accuracy) over all pictures: each rank looks at its share, the sums are all-reduced."""
    mine = slice(collectives.rank(), None, collectives.size())
    _, probability = forward(weights, pictures[mine])
    sums = np.zeros(2)
    if len(labels[mine]):
        sums[0] = -np.log(probability[np.arange(len(labels[mine])), labels[mine]] + 1e-30).sum()
        sums[1] = np.count_nonzero(probability.argmax(axis=1) == labels[mine])
    loss, right = collectives.allreduce(sums, op=collectives.Sum, name="score") / len(labels)
    return float(loss), float(right)


def train(options: argparse.Namespace) -> tuple[Weights, list[dict[str, float]]]:
    """Train; returns the weights and, per epoch, the losses and accuracies."""
    rank, size = collectives.rank(), collectives.size()
    dtype = np.dtype(options.dtype)
    pictures, labels, test_pictures, test_labels = digits(dtype)
    weights = new_weights(options.hidden, dtype)
    for name, weight in weights.items():
        collectives.broadcast_(weight, root_rank=0, name=name)
    momentum = {name: np.zeros_like(weight) for name, weight in weights.items()}
    random = np.random.default_rng(3)
    history = []
    if rank == 0:
        print(f"{size} rank{'s' * (size > 1)}, {len(labels)} pictures, batches of {options.batch}, {dtype.name}")
        print(
            f"{'epoch':>5} {'loss':>9} {'accuracy':>9} {'test loss':>10} {'test accuracy':>14} {'seconds':>8}",
            flush=True,
        )
    for epoch in range(1, options.epochs + 1):
        begin = perf_counter()
        order = random.permutation(len(labels))
        for start in range(0, len(order), options.batch):
            batch = order[start : start + options.batch]
            mine = batch[rank::size]
            for name, gradient in gradients(weights, pictures[mine], labels[mine]).items():
                # The average over the ranks is then the mean over the whole batch, even if the parts differ in size.
                gradient *= size / len(batch)
                collectives.allreduce_(gradient, name=name)
                momentum[name] *= 0.9
                momentum[name] += gradient
                weights[name] -= options.rate * momentum[name]
        seconds = perf_counter() - begin
        loss, accuracy = score(weights, pictures, labels)
        test_loss, test_accuracy = score(weights, test_pictures, test_labels)
        history.append({"loss": loss, "accuracy": accuracy, "test_loss": test_loss, "test_accuracy": test_accuracy})
        if rank == 0:
            print(
                f"{epoch:>5} {loss:>9.4f} {accuracy:>9.4f} {test_loss:>10.4f} {test_accuracy:>14.4f} {seconds:>8.3f}",
                flush=True,
            )
    return weights, history


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on scikit-learn's digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="pictures in a batch, over all ranks")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--rate", type=float, default=0.03, help="learning rate")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--save", metavar="FILE.npz", help="where rank 0 writes the weights and the history")
    options = parser.parse_args()
    if min(options.epochs, options.batch, options.hidden) < 1:
        parser.error("--epochs, --batch and --hidden must be 1 or more")
    collectives.init()
    weights, history = train(options)
    if options.save and collectives.rank() == 0:
        columns = {f"history.{key}": np.array([epoch[key] for epoch in history]) for key in history[0]}
        arrays: dict[str, Any] = weights | columns
        np.savez(options.save, **arrays)
    collectives.shutdown()


if __name__ == "__main__":
    main()
