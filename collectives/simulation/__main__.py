"""``python -m collectives.simulation`` is ``collectives simulate``."""

import sys

from collectives.tools.simulate import main

sys.exit(main())
