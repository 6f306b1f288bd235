"""`collectives.tensorflow` under Horovod's name."""

from typing import Any

import collectives.tensorflow as _ours
from horovod.common.util import check_extension, split_list  # type: ignore[import-not-found]  # noqa: F401

# Without a star import: SyncBatchNormalization needs Keras, which is imported on first use.
globals().update({name: getattr(_ours, name) for name in _ours.__all__ if name != "SyncBatchNormalization"})

from horovod.common.process_sets import add_process_set  # type: ignore[import-not-found]  # noqa: E402, F401
from horovod.tensorflow import compression, elastic, functions, mpi_ops, util  # type: ignore[import-not-found]  # noqa: E402, F401
from horovod.tensorflow.mpi_ops import handle_average_backwards_compatibility  # type: ignore[import-not-found]  # noqa: E402, F401
from horovod.tensorflow.util import (  # type: ignore[import-not-found]  # noqa: E402
    _cache,  # noqa: F401
    _executing_eagerly,  # noqa: F401
    _make_subgraph,  # noqa: F401
    refs_to_vars,  # noqa: F401
    vars_to_refs,  # noqa: F401
)


def __getattr__(name: str) -> Any:
    """Import the layer, which needs Keras, on first use."""
    return getattr(_ours, name)
