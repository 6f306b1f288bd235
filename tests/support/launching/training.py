"""One training for every place where ranks are started: its result there is that of a single process.

Imported by the ranks too, and so free of pytest.
"""

import numpy as np

ROWS, WIDTH, STEPS = 48, 6, 20


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    inputs = random.normal(size=(ROWS, WIDTH))
    return inputs, inputs @ random.normal(size=WIDTH) + 0.1 * random.normal(size=ROWS)


def train_alone() -> np.ndarray:
    """Weights after gradient descent on all rows."""
    inputs, outputs = data()
    weights = np.zeros(WIDTH)
    for _ in range(STEPS):
        weights -= 0.1 * inputs.T @ (inputs @ weights - outputs) / len(inputs)
    return weights


def train_as_rank() -> np.ndarray:
    """The same weights, from gradients that each rank has of its part of the rows; the number of ranks divides them."""
    import collectives

    collectives.init()
    rank, size = collectives.rank(), collectives.size()
    inputs, outputs = (rows[rank::size] for rows in data())
    weights = np.zeros(WIDTH)
    for _ in range(STEPS):
        gradient = inputs.T @ (inputs @ weights - outputs) / len(inputs)
        weights -= 0.1 * np.asarray(collectives.allreduce(gradient, average=True))
    return weights
