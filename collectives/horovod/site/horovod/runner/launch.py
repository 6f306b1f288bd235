"""``python -m horovod.runner.launch`` is ``horovodrun``, which is ``collectivesrun --as-horovod``."""

import sys

from collectives.launch.cli import horovodrun


def run_commandline() -> None:
    """Run the command, and exit."""
    sys.exit(horovodrun())


if __name__ == "__main__":
    run_commandline()
