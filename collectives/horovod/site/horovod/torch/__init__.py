"""`collectives.torch` under Horovod's name."""

from collectives.base.errors import RecoverableError as HorovodInternalError  # noqa: F401
from collectives.torch import *  # noqa: F403
from horovod.common.process_sets import add_process_set  # type: ignore[import-not-found]  # noqa: F401
from horovod.common.util import check_extension, split_list  # type: ignore[import-not-found]  # noqa: F401
from horovod.torch import compression, elastic, functions, mpi_ops, optimizer, sync_batch_norm  # type: ignore[import-not-found, no-redef]  # noqa: F401
