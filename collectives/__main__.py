"""``python -m collectives`` is ``collectivesrun``."""

import sys

from collectives.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
