"""The operations of `collectives.torch`."""

from collectives.base.errors import RecoverableError as HorovodInternalError  # noqa: F401
from collectives.torch import *  # noqa: F403
from horovod.common.basics import HorovodBasics  # type: ignore[import-not-found]
from horovod.common.process_sets import add_process_set  # type: ignore[import-not-found]  # noqa: F401
from horovod.common.util import (  # type: ignore[import-not-found]
    check_installed_version,  # noqa: F401
    get_average_backwards_compatibility_fun,
    gpu_available,  # noqa: F401
    num_rank_is_power_2,
)

_basics = HorovodBasics(__file__, "mpi_lib_v2")
handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(_basics)
check_num_rank_power_of_2 = num_rank_is_power_2
