"""``python -m horovod.runner.launch`` is ``horovodrun``, which is ``collectivesrun --as-horovod``."""

import sys

from collectives.launch import report
from collectives.launch.cli import horovodrun
from horovod.common.util import (  # type: ignore[import-not-found]
    ccl_built,  # noqa: F401
    ddl_built,  # noqa: F401
    extension_available,  # noqa: F401
    gloo_built,  # noqa: F401
    mpi_built,  # noqa: F401
    nccl_built,  # noqa: F401
)


def check_build(verbose: bool) -> None:
    """Print what is installed, as ``horovodrun --check-build`` does, and exit."""
    print(report.check_build(as_horovod=True)[0])
    sys.exit(0)


def run_commandline() -> None:
    """Run the command, and exit."""
    sys.exit(horovodrun())


if __name__ == "__main__":
    run_commandline()
