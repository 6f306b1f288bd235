"""Where estimators keep a frame as Parquet, and how ranks read their parts of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
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


class Share:
    """A rank's part of a folder of Parquet files: every ``size``-th file.

    Attributes:
        rows: of the rank that has most.

    Raises:
        InvalidArgumentError: there are no rows.
    """

    def __init__(self, path: str, columns: Sequence[str], rank: int, size: int) -> None:
        path = path.replace("s3a://", "s3://", 1)  # Spark's name of S3
        files = list(pyarrow.dataset.dataset(path, format="parquet").get_fragments())
        files = [file for file in files if file.count_rows()]
        if not files:
            raise InvalidArgumentError(
                f"{path} has no rows; pass a DataFrame that has some, and a validation below 1 [L116]"
            )
        shares = [files[number::size] or [files[number % len(files)]] for number in range(size)]
        self.rows = max(sum(file.count_rows() for file in share) for share in shares)
        self._columns = list(columns)
        self._groups = [group for file in shares[rank] for group in file.split_by_row_group()]

    def epoch(self, number: int, random: np.random.Generator | None = None) -> Iterator[list[np.ndarray[Any, Any]]]:
        """Read ``rows`` rows in batches, of which one row group is in memory; first ones again where a rank has fewer.

        Args:
            number: of rows in a batch; the last one may have fewer.
            random: shuffles the row groups, and the rows of each.

        Yields:
            The columns' values, as `arrays` has them.
        """
        left, table = self.rows, None
        order = random.permutation(len(self._groups)) if random else range(len(self._groups))
        for group in itertools.cycle(self._groups[each] for each in order):
            rows = group.to_table(columns=self._columns)
            rows = rows.take(random.permutation(len(rows))) if random else rows
            rows = rows.slice(0, left)
            left -= len(rows)
            table = rows if table is None else pyarrow.concat_tables([table, rows])
            while len(table) >= number or (len(table) and not left):
                yield arrays(table.slice(0, number), self._columns)
                table = table.slice(number)
            if not left:
                return


def arrays(table: Any, columns: Sequence[str]) -> list[np.ndarray[Any, Any]]:
    """Return columns of an Arrow table as arrays, of shape (rows,), or (rows, ...) for columns of lists.

    Raises:
        InvalidArgumentError: a column has nulls, or lists of several lengths.
    """
    values = []
    for name in columns:
        column = table.column(name)
        if column.null_count:
            raise InvalidArgumentError(
                f"column {name!r} has {column.null_count} nulls; expected none: fill them, or drop these rows [L117]"
            )
        array = column.to_numpy()
        try:
            values.append(np.stack(array) if array.dtype == object else array)
        except ValueError as error:
            raise InvalidArgumentError(f"column {name!r}: expected lists of equal length: {error} [L118]") from None
    return values
