"""``python -m collectives.launch`` is ``collectivesrun``."""

import sys

from collectives.launch.cli import main

sys.exit(main())
