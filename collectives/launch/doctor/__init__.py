"""``collectivesrun --doctor``: what is wrong with this host and others, what it costs, and what to do.

    examination.py   starts a probe on each host, asks all of them, and prints what they find
    probe.py         the process on each host
    packages.py      what is installed, MPI, GPUs
    host.py          shared memory, huge pages, limits, CPUs
    links.py         interfaces, connections between two hosts
    launches.py      a small job by each launcher; rank.py is what its ranks run
    findings.py      one line of the answer

Nothing is measured in a second way: packages, interfaces, shared memory and huge pages are asked of the code that uses
them.
"""

from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run ``collectivesrun --doctor`` with these arguments and return its exit code."""
    from collectives.launch import cli

    return cli.main(["--doctor", *arguments])
