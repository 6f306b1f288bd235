"""Where estimators keep a frame as Parquet, and how ranks read their parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.dataset

from collectives.base.errors import InvalidArgumentError


class Store:
    """A folder that Spark's executors and this program reach by the same path, or the same URL.

    Args:
        prefix_path: its path, such as ``/shared/runs``, or a URL that Spark and pyarrow know, such as ``hdfs://...``.

    Example:
        store = Store.create("/shared/runs")
    """

    def __init__(self, prefix_path: str) -> None:
        self.prefix_path = str(prefix_path)

    @staticmethod
    def create(prefix_path: str) -> Store:
        """Return the store at a path."""
        return Store(prefix_path)

    def get_run_path(self, run_id: str) -> str:
        """Where a run's data is."""
        return f"{self.prefix_path.rstrip('/')}/{run_id}"


LocalStore = FilesystemStore = Store


def read_share(path: str, columns: Sequence[str], rank: int, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Read a rank's rows of a folder of Parquet files, from the row groups that have them.

    The rows are divided in order; the last rank takes first rows again, so that all have equally many.

    Returns:
        The columns' values, as `arrays` does. InvalidArgumentError: there are no rows.
    """
    data = pyarrow.dataset.dataset(path, format="parquet")
    total = data.count_rows()
    if not total:
        raise InvalidArgumentError(f"there are no rows in {path}: expected a frame with some, and validation below 1")
    each = -(-total // size)
    wanted = np.arange(rank * each, (rank + 1) * each) % total
    pieces, before = [], 0
    for file in data.get_fragments():
        for group in file.split_by_row_group():
            number = group.count_rows()
            inside = wanted[(wanted >= before) & (wanted < before + number)] - before
            if len(inside):
                pieces.append(group.take(pyarrow.array(inside), columns=list(columns)))
            before += number
    return arrays(pyarrow.concat_tables(pieces), columns)


def arrays(table: Any, columns: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return columns of an Arrow table as arrays, of shape (rows,), or (rows, ...) for columns of lists.

    Raises:
        InvalidArgumentError: a column has nulls, or lists of several lengths.
    """
    values = {}
    for name in columns:
        column = table.column(name)
        if column.null_count:
            raise InvalidArgumentError(f"column {name!r} has {column.null_count} nulls: expected none")
        array = column.to_numpy()
        try:
            values[name] = np.stack(array) if array.dtype == object else array
        except ValueError as error:
            raise InvalidArgumentError(f"column {name!r}: expected lists of one length: {error}") from None
    return values
