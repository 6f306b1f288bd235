"""`collectives.tensorflow.keras` under Horovod's name."""

from collectives.tensorflow.keras import *  # noqa: F403
from horovod.common.process_sets import add_process_set  # type: ignore[import-not-found]  # noqa: F401
from horovod.tensorflow.keras import elastic  # type: ignore[import-not-found, no-redef]  # noqa: F401
