"""``python -m collectives.tools.bench allreduce ...``: one rank of ``collectives bench``, which starts them."""

import sys

from collectives.tools.bench.command import rank

sys.exit(rank(*sys.argv[1:]))
