"""What the estimators share: a frame becomes Parquet, ranks train on their parts of it, a model predicts in frames."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow
from pyspark import cloudpickle
from pyspark.ml import Estimator, Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DoubleType, StructField, StructType

from collectives.base.errors import InvalidArgumentError
from collectives.spark.jobs import active_context, number_of_ranks
from collectives.spark.store import Store, arrays

_WITHOUT_EFFECT = {
    *("train_reader_num_workers", "val_reader_num_workers", "reader_pool_type", "inmemory_cache_all"),
    *("partitions_per_process", "shuffle_buffer_size", "compress_sparse_cols", "mp_start_method"),
}


class FrameEstimator(Estimator):  # type: ignore[misc]
    """An estimator of Spark that trains on ranks; see its subclasses.

    Args:
        model, optimizer, loss: of the framework.
        store: where the frame is written, under ``run_id``.
        feature_cols: columns of numbers, lists of numbers or Spark's vectors: the model's inputs in order.
        label_cols: the column of the label, of the same kinds; exactly one.
        num_proc: the number of ranks; by default Spark's default parallelism.
        batch_size: rows of each rank in a step.
        epochs: how often the training passes over all rows.
        validation: the share of the rows, below 1, that is held out for a validation loss; or the name of a column that
            marks these rows; None: no rows.
        shuffle: whether each rank shuffles its row groups, and the rows of each group, in every epoch.
        run_id: a name that the store does not have yet; by default a new one.
        verbose: whether rank 0 prints the losses to its executor's log; 0: no.
        horovods: Horovod's options about readers have no effect; InvalidArgumentError: any other.
    """

    _WHAT = ""

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        loss: Any,
        store: Store,
        feature_cols: Sequence[str],
        label_cols: Sequence[str],
        num_proc: int | None = None,
        batch_size: int = 32,
        epochs: int = 1,
        validation: float | str | None = None,
        shuffle: bool = True,
        run_id: str | None = None,
        verbose: int = 1,
        **horovods: Any,
    ) -> None:
        super().__init__()
        unknown = [name for name, value in horovods.items() if name not in _WITHOUT_EFFECT and value is not None]
        if unknown:
            raise InvalidArgumentError(f"{self._WHAT}: the option {unknown[0]} is not supported; leave it out [L109]")
        if len(label_cols) != 1:
            raise InvalidArgumentError(
                f"{self._WHAT}: label_cols={label_cols}: expected one column, because the model has one output [L131]"
            )
        if batch_size < 1 or epochs < 1:
            raise InvalidArgumentError(
                f"{self._WHAT}: expected batch_size and epochs of at least 1, got {batch_size} and {epochs} [L110]"
            )
        if isinstance(validation, (int, float)) and not 0 <= validation < 1:
            raise InvalidArgumentError(f"{self._WHAT}: validation={validation}: expected at least 0 and below 1 [L111]")
        self.model, self.optimizer, self.loss, self.store = model, optimizer, loss, store
        self.feature_cols, self.label_cols, self.num_proc = list(feature_cols), list(label_cols), num_proc
        self.batch_size, self.epochs, self.validation, self.shuffle = batch_size, epochs, validation, shuffle
        self.run_id, self.verbose = run_id, verbose

    def _fit(self, dataset: DataFrame) -> FrameModel:
        run_path = self.store.get_run_path(self.run_id or f"run-{uuid.uuid4()}")
        ranks = number_of_ranks(self._WHAT, active_context(self._WHAT), self.num_proc)
        columns = self.feature_cols + self.label_cols
        by_column = [self.validation] if isinstance(self.validation, str) else []
        frame = _without_vectors(dataset.select(*columns, *by_column), columns)
        parts = {"train": frame}
        if by_column:
            is_validation = frame[by_column[0]].cast("boolean")
            parts = {"train": frame.where(~is_validation), "validation": frame.where(is_validation)}
        elif self.validation:
            fraction = float(self.validation)
            parts = dict(zip(("train", "validation"), frame.randomSplit([1 - fraction, fraction], 0), strict=True))
        paths = {name: f"{run_path}/{name}" for name in parts}
        for name, part in parts.items():
            part.select(*columns).repartition(ranks).write.mode("error").parquet(paths[name])
        return self._train(paths, ranks)

    def _train(self, paths: Mapping[str, str], ranks: int) -> FrameModel:
        """Train on the Parquet files of these parts."""
        raise NotImplementedError


class FrameModel(Model):  # type: ignore[misc]
    """A trained model that adds predictions to frames.

    Attributes:
        model: the framework's.
        history: of each epoch the losses, by name.

    Args:
        is_list: whether the model's output is of several numbers for each row.
        env: variables of the processes that predict.
    """

    def __init__(
        self,
        model: Any,
        predict: Callable[[Any, list[np.ndarray[Any, Any]]], np.ndarray[Any, Any]],
        history: Mapping[str, list[float]],
        is_list: bool,
        estimator: FrameEstimator,
        **env: str,
    ) -> None:
        super().__init__()
        self.model, self.history = model, history
        self._predict, self._is_list, self._env = predict, is_list, env
        self._feature_cols = estimator.feature_cols
        self._output_col = f"{estimator.label_cols[0]}__output"

    def getModel(self) -> Any:
        """The framework's model."""
        return self.model

    def getHistory(self) -> Mapping[str, list[float]]:
        """Of each epoch the losses, by name."""
        return self.history

    def setOutputCols(self, value: Sequence[str]) -> FrameModel:
        """Name the column of the predictions; by default it is called after the label, with ``__output``."""
        (self._output_col,) = value
        return self

    def _transform(self, dataset: DataFrame) -> DataFrame:
        frame = _without_vectors(dataset, self._feature_cols)
        column = StructField(self._output_col, ArrayType(DoubleType()) if self._is_list else DoubleType())
        predictor, env = cloudpickle.dumps((self.model, self._predict)), self._env
        features, is_list = self._feature_cols, self._is_list

        def add_predictions(batches: Iterator[Any]) -> Iterator[Any]:
            os.environ.update(env)
            model, predict = cloudpickle.loads(predictor)
            for batch in batches:
                table = pyarrow.Table.from_batches([batch])
                if table.num_rows:
                    rows = predict(model, arrays(table, features)).reshape(table.num_rows, -1).astype(np.float64)
                    yield from table.append_column(
                        column.name, pyarrow.array(list(rows) if is_list else rows[:, 0])
                    ).to_batches()

        return frame.mapInArrow(add_predictions, StructType([*frame.schema.fields, column]))


def _without_vectors(frame: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The frame with lists in the place of Spark's vectors."""
    vectors = [field.name for field in frame.schema.fields if isinstance(field.dataType, VectorUDT)]
    return frame.withColumns({name: vector_to_array(frame[name]) for name in vectors if name in columns})
