"""Ranks in the tasks of a local Spark."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.launching.training import train_alone, train_as_rank

pytest.importorskip("pyspark", reason="Spark is not installed")
if shutil.which("java") is None:
    pytest.skip("there is no Java", allow_module_level=True)

import collectives.spark
from collectives import CollectiveTimeoutError, InvalidArgumentError, NotInitializedError, RankFailedError

pytestmark = pytest.mark.slow
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[3]").config("spark.executorEnv.PYTHONPATH", ROOT)
    for name, value in {"ui.enabled": False, "driver.host": "127.0.0.1", "sql.shuffle.partitions": 3}.items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("FATAL")
    yield session
    session.stop()


def meet(culprit: int = -1, how: str = "") -> tuple[int, int, float]:
    collectives.init()
    rank = collectives.rank()
    if rank == culprit and how == "raise":
        raise ValueError("as asked")
    if rank == culprit and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return rank, os.getpid(), float(collectives.allreduce(np.full(4, rank + 1.0), average=False)[0])


def test_there_has_to_be_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.SparkContext._active_spark_context", None)  # other tests' session, if one is there
    with pytest.raises(NotInitializedError, match="there is no SparkContext"):
        collectives.spark.run(meet)


def test_training(spark: Any) -> None:
    for weights in collectives.spark.run(train_as_rank):
        np.testing.assert_allclose(weights, train_alone(), rtol=1e-12)


def test_workers_are_ranks_of_one_job_after_the_other(spark: Any) -> None:
    first, second = (collectives.spark.run(meet, env={"ANY": 1}) for _ in range(2))
    assert [(rank, total) for rank, _, total in first] == [(rank, 6.0) for rank in range(3)]
    assert {process for _, process, _ in first} == {process for _, process, _ in second}
    assert [total for *_, total in collectives.spark.run(meet, num_proc=2)] == [3.0, 3.0]


def test_a_rank_that_raises_ends_the_call(spark: Any) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 on .* failed: ValueError: as asked \[L7\]\nTraceback"):
        collectives.spark.run(meet, (1, "raise"))


def test_a_python_worker_that_is_killed_ends_the_call(spark: Any) -> None:
    with pytest.raises(
        RankFailedError, match=r"(?s)Spark's job has failed \[L17\]: .*Python worker exited unexpectedly"
    ):
        collectives.spark.run(meet, kwargs={"culprit": 1, "how": "kill"})
    assert len(collectives.spark.run(meet)) == 3


def test_what_cannot_be_run_is_said(spark: Any) -> None:
    with pytest.raises(CollectiveTimeoutError, match=r"started none of the 5 tasks within 1 s.*parallelism is 3,"):
        collectives.spark.run(meet, num_proc=5, start_timeout=1)
    with pytest.raises(InvalidArgumentError, match="num_proc=0: expected at least 1"):
        collectives.spark.run(meet, num_proc=0)
    with pytest.raises(InvalidArgumentError, match="unknown argument executable"):
        collectives.spark.run(meet, executable="python3", verbose=2)


def test_a_rank_that_raises_ends_others_that_compute(spark: Any) -> None:
    def fail_or_compute() -> None:
        collectives.init()
        if collectives.rank() == 1:
            raise ValueError("as asked")
        time.sleep(1000)  # is ended

    with pytest.raises(RankFailedError, match=r"rank 1 on .* failed: ValueError: as asked"):
        collectives.spark.run(fail_or_compute)


def train_elastically(folder: str) -> tuple[int, float, int]:
    """Trains until a killed rank has been replaced."""
    collectives.init()

    @collectives.elastic.run
    def loop(state: Any) -> tuple[int, float, int]:
        while state.step < 10 or collectives.size() < 2:
            if os.environ["COLLECTIVES_MEMBER"] == "1" and state.step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            state.total += float(collectives.allreduce(np.full(1, collectives.rank() + 1.0), average=True)[0])
            state.step += 1
            state.commit()
        return collectives.rank(), state.total, state.step

    return loop(collectives.elastic.ObjectState(step=0, total=0.0))


def test_a_killed_rank_of_an_elastic_job_is_replaced(spark: Any) -> None:
    results = collectives.spark.run_elastic(train_elastically, ("",), num_proc=2, min_num_proc=1, max_num_proc=2)
    assert [rank for rank, *_ in results] == [0, 1]
    assert len({(total, steps) for _, total, steps in results}) == 1
    with pytest.raises(RankFailedError, match=r"(?s)run_elastic: .*as asked"):
        collectives.spark.run_elastic(meet, (0, "raise"), num_proc=1)
    with pytest.raises(InvalidArgumentError, match="expected 1 <= min_num_proc <= max_num_proc, got 3 and 2"):
        collectives.spark.run_elastic(meet, num_proc=2, min_num_proc=3)


def test_horovods_names() -> None:
    program = "import horovod.spark.runner, horovod.spark.common.store; horovod.spark.run_elastic"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([f"{ROOT}/collectives/horovod/site", ROOT])}
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=60, check=True)


@pytest.fixture
def frame(spark: Any) -> Any:
    random = np.random.default_rng(5)
    features = random.normal(size=(96, 3))
    labels = features @ [1.0, -2.0, 0.5] + 0.25
    rows = [(row[:2].tolist(), float(row[2]), float(label)) for row, label in zip(features, labels, strict=True)]
    return spark.createDataFrame(rows, "pair array<double>, single double, label double")


def test_shares_have_equally_many_rows_and_leave_none(tmp_path: Path) -> None:
    import pyarrow.parquet

    from collectives.spark.store import Share

    for number, rows in enumerate([7, 5, 0]):
        table = pyarrow.table({"x": np.arange(rows) + 10.0 * number})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=3)
    for size in (2, 3):  # the third rank reads a file that the first one reads too
        for random in (None, np.random.default_rng(1)):
            shares = [Share(tmp_path.as_uri(), ["x"], rank, size) for rank in range(size)]
            read = [[rows for (rows,) in share.epoch(4, random)] for share in shares]
            assert [[len(rows) for rows in batches] for batches in read] == [[4, 3]] * size
            assert {*np.concatenate([*read[0], *read[1]])} == {*range(7), *range(10, 15)}
    with pytest.raises(InvalidArgumentError, match="has no rows"):
        Share((tmp_path / "2.parquet").as_uri(), ["x"], 0, 2)


def check_estimator(estimator: Any, frame: Any) -> Any:
    """Fits a linear model, whose predictions and losses have to be good."""
    fitted = estimator.fit(frame)
    losses = fitted.getHistory()
    assert len(losses["loss"]) == len(losses["val_loss"]) == estimator.epochs
    assert losses["val_loss"][-1] < 0.01 * losses["val_loss"][0]
    rows = fitted.setOutputCols(["guess"]).transform(frame.coalesce(1)).select("label", "guess").collect()
    np.testing.assert_allclose([row.guess for row in rows], [row.label for row in rows], atol=0.2)
    return fitted


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchs_estimator(frame: Any, tmp_path: Path) -> None:
    import torch

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, pair: torch.Tensor, single: torch.Tensor) -> torch.Tensor:
            return self.layer(torch.cat([pair, single], 1))  # type: ignore[no-any-return]

    torch.manual_seed(1)
    model = Linear()
    arguments: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loss": torch.nn.functional.mse_loss,
        "store": collectives.spark.Store.create(tmp_path.as_uri()),
        "feature_cols": ["pair", "single"],
        "label_cols": ["label"],
    }
    estimator = collectives.spark.TorchEstimator(
        **arguments,
        input_shapes=[[-1, 2], [-1, 1]],
        epochs=8,
        batch_size=8,
        num_proc=2,
        validation=0.25,
        run_id="one",
    )
    fitted = check_estimator(estimator, frame)
    np.testing.assert_allclose(fitted.model.layer.weight.detach()[0], [1.0, -2.0, 0.5], atol=0.1)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["train", "validation"]
    with pytest.raises(InvalidArgumentError, match="TorchEstimator: the option sample_weight_col is not supported"):
        collectives.spark.TorchEstimator(**arguments, sample_weight_col="weight")


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ["keras", "torch"])), reason="Keras or torch is missing")
def test_kerass_estimator(frame: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # which Spark's workers have imported for the test before
    import keras
    from pyspark.sql import functions

    inputs = keras.Input((2,)), keras.Input((1,))
    keras.utils.set_random_seed(1)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))
    estimator = collectives.spark.KerasEstimator(
        model=model,
        optimizer=keras.optimizers.SGD(0.1),
        loss="mse",
        store=collectives.spark.LocalStore(str(tmp_path)),
        feature_cols=["pair", "single"],
        label_cols=["label"],
        epochs=16,
        batch_size=8,
        num_proc=2,
        validation="held",
        verbose=0,
    )
    check_estimator(estimator, frame.withColumn("held", functions.col("single") > 0.7))
