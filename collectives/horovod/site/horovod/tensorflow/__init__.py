"""`collectives.tensorflow` under Horovod's name."""

from typing import Any

import collectives.tensorflow as _ours

globals().update({name: getattr(_ours, name) for name in _ours.__all__ if name != "SyncBatchNormalization"})


def __getattr__(name: str) -> Any:
    """The layer, which needs Keras, when it is asked for."""
    return getattr(_ours, name)
