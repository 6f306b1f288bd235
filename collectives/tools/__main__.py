"""``python -m collectives.tools`` is ``collectives``."""

import sys

from collectives.tools.command import main

sys.exit(main())
