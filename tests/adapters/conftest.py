"""The framework that a file is for, joined with the other ranks: once for all files of an mpirun."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
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


@pytest.fixture(scope="session")
def world() -> Iterator[None]:
    """Ends with the last file."""
    yield
    importlib.import_module("collectives").shutdown()


@pytest.fixture(scope="module")
def hvd(request: pytest.FixtureRequest, world: None) -> Any:
    """The adapter that the file's name tells, initialized; for Keras on the backend that KERAS_BACKEND names."""
    name = request.path.stem.split("_")[1]
    if name == "torch":
        _prepare_torch()
    if name == "tensorflow":
        _prepare_tensorflow()
    if name.startswith("keras"):
        name = "tensorflow.keras" if "TF_USE_LEGACY_KERAS" in os.environ else "keras"
    adapter = importlib.import_module(f"collectives.{name}")
    adapter.init()
    return adapter


def _prepare_torch() -> None:
    import torch

    torch.set_num_threads(1)  # there are more ranks than cores
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        # torch's compiler shows bars. A thread that watches them might call collectives, as far as the engine knows,
        # which therefore waits for 20 seconds before it believes that ranks have parted.
        tqdm.monitor_interval = 0


def _prepare_tensorflow() -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)


@pytest.fixture
def folder(hvd: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all ranks."""
    return Path(hvd.broadcast_object(str(tmp_path_factory.mktemp("shared")) if hvd.rank() == 0 else None))


@pytest.fixture
def pair(hvd: Any) -> Iterator[Any]:
    """The process set of the first and the last rank."""
    chosen = hvd.add_process_set([0, hvd.size() - 1])
    yield chosen
    hvd.remove_process_set(chosen)


@pytest.fixture
def as_horovod(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of Horovod, on which the ranks agree at `init` otherwise."""
    from collectives.worlds.runtime import world_of

    monkeypatch.setattr(world_of(None), "config", replace(world_of(None).config, gradients="horovod"))
