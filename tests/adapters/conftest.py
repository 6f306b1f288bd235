"""The framework that a test is for, joined with the other ranks: once for all files of an mpirun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ON_ONE_RANK = ("*_op*.py", "*_training.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave these files to ``test_adapters.py``, which starts ranks for them: looking into them imports every
    framework."""
    return None if config.getoption("--with-mpi") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave one rank only the files that ``test_adapters_on_one_rank.py`` starts: the others need ranks that differ."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not any(map(item.path.match, ON_ONE_RANK)):
            item.add_marker(pytest.mark.mpi(min_size=2))


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all ranks, of the `hvd` that the test names before it."""
    hvd = request.getfixturevalue(next(name for name in request.fixturenames if name.startswith("hvd")))
    return Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("shared")) if hvd.rank() == 0 else None))


@pytest.fixture(scope="session")
def hvd() -> Iterator[Any]:
    """`collectives.torch`, initialized."""
    import torch

    import collectives.torch

    torch.set_num_threads(1)  # there are more ranks than cores
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        # torch's compiler shows bars. A thread that watches them might call collectives, as far as the engine knows,
        # which therefore waits for 20 seconds before it believes that ranks have parted.
        tqdm.monitor_interval = 0
    collectives.torch.init()
    yield collectives.torch
    collectives.torch.shutdown()


@pytest.fixture(scope="session")
def hvd_tf() -> Iterator[Any]:
    """`collectives.tensorflow`, initialized."""
    import tensorflow as tf

    import collectives.tensorflow

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    collectives.tensorflow.init()
    yield collectives.tensorflow
    collectives.tensorflow.shutdown()


@pytest.fixture(scope="session")
def hvd_keras() -> Iterator[Any]:
    """`collectives.keras`, initialized, on the backend that KERAS_BACKEND names."""
    import collectives.keras

    collectives.keras.init()
    yield collectives.keras
    collectives.keras.shutdown()


@pytest.fixture(scope="session")
def hvd_jax() -> Iterator[Any]:
    """`collectives.jax`, initialized."""
    import collectives.jax

    collectives.jax.init()
    yield collectives.jax
    collectives.jax.shutdown()
