"""``make demo``: the package's demo, with MPI and gloo in its table."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from collectives.tools import demo

if __name__ == "__main__":
    peers = ["mpi", "gloo"] if find_spec("torch") else ["mpi"]
    benchmark = ["benchmarks.allreduce", "--peers", ",".join(peers)]
    sys.exit(demo.main(benchmark=benchmark, beside=f", beside {' and '.join(peers)}"))
