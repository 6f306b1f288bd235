"""This rank's place from the environment, and the variables that a launcher may pass on."""

from __future__ import annotations

import os
import re

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY"}
"""Variables that are not passed to other hosts, as patterns for the beginning of a name."""
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_PLACES = (("HOROVOD_RANK", "HOROVOD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))


def is_exportable(v: str) -> bool:
    """Whether a variable may be passed to other hosts."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return rank and size from the launcher's variables, before ``init()``; (0, 1) without a launcher.

    Raises:
        RuntimeError: only one of the two is set.
    """
    for names in _PLACES:
        rank, size = (os.environ.get(name) for name in names)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(
                f"rank and size: expected both {names[0]} and {names[1]} in the environment, or neither; got one of "
                f"them"
            )
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Open MPI starts its daemons by Kubeflow's script."""
    return os.environ.get("OMPI_MCA_plm_rsh_agent") == KUBEFLOW_MPI_EXEC  # noqa: SIM112 (Open MPI spells it so)
