"""``python -m collectives.simulation``: the predicted time of each algorithm of a collective."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from collectives.base.config import parse_bytes
from collectives.base.errors import InvalidArgumentError
from collectives.schedules import registry
from collectives.schedules.partition import split
from collectives.simulation.clock import Report, simulate
from collectives.simulation.links import Network


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser("python -m collectives.simulation", description=__doc__)
    parser.add_argument("collective", nargs="?", default="allreduce", choices=registry.COLLECTIVES)
    parser.add_argument("-np", type=int, required=True, help="ranks")
    parser.add_argument("--bytes", type=parse_bytes, required=True, help="of the input; an allgather's: of the result")
    parser.add_argument("--latency", type=float, default=5e-6, help="seconds of a message (default: %(default)s)")
    parser.add_argument("--bandwidth", type=float, default=12.5e9, help="bytes per second of a rank's link, one way")
    parser.add_argument("--local-size", type=int, default=1, help="ranks of a host (default: 1)")
    parser.add_argument("--local-latency", type=float, help="between ranks of a host (default: --latency)")
    parser.add_argument("--local-bandwidth", type=float, help="between ranks of a host (default: --bandwidth)")
    parser.add_argument("--uplink", type=float, default=float("inf"), help="bytes per second of a host's one way out")
    parser.add_argument("--reduction", type=float, default=float("inf"), help="bytes per second that a rank combines")
    parser.add_argument("--segment", type=parse_bytes, help="bytes of a chunk in one pipeline unit (default: all)")
    asked = parser.parse_args(arguments)
    if asked.np < 1 or asked.local_size < 1:
        parser.error("-np and --local-size: expected at least 1")
    hosts = [range(at, min(at + asked.local_size, asked.np)) for at in range(0, asked.np, asked.local_size)]
    network = Network(
        *(asked.latency, asked.bandwidth, hosts, asked.local_latency, asked.local_bandwidth),
        uplink=asked.uplink,
        reduction=asked.reduction,
    )
    try:
        reports = predict(asked.collective, asked.bytes, network, asked.segment)
    except InvalidArgumentError as error:
        parser.error(str(error))
    print(f"{'algorithm':20} {'ms':>12} {'bus GB/s':>9} {'messages':>9}")
    for name, report in sorted(reports.items(), key=lambda entry: entry[1].total):
        print(f"{name:20} {1e3 * report.total:12.4f} {report.busbw / 1e9:9.2f} {report.messages:9}")
    return 0


def predict(collective: str, nbytes: int, network: Network, segment: int | None = None) -> dict[str, Report]:
    """Simulate every algorithm of a collective that has a schedule; arguments and errors as of `simulate`.

    Args:
        nbytes: of a rank's input; of an allgather's result.
    """
    hosts = network.hosts or ()
    size, reports = sum(map(len, hosts)), {}
    for name in dict.fromkeys((*registry.on_host(collective), *registry.on_gpu(collective))):
        algorithm = registry.find(collective, name)
        if not algorithm.native:
            schedule = algorithm.schedules(hosts)
            sizes = split(nbytes * (size if collective == "alltoall" else 1), schedule(0).chunks)
            reports[name] = simulate(map(schedule, range(size)), sizes, network, segment)
    return reports


if __name__ == "__main__":
    sys.exit(main())
