"""NCCL's own collectives: what its published tuning model says they take, and NVLink SHARP from its traffic.

    ring        latency + bus bytes / bandwidth          bus bytes: 2(N-1)/N * S for an all-reduce, else (N-1)/N * S
    NVLS        S (1 + 1/N) / (0.85 * bandwidth)         one host, whose switch reduces: each GPU sends its S and the
                                                         sum of its N-th part, and receives as much
    NVLS tree   hosts exchange in two trees              each NIC carries at most what NCCL's table says

NCCL chooses the quickest by its model, as `time` does. Its constants were tuned by NCCL's authors on hardware like that
which is predicted here; none was fitted by us.

Source of all constants: NVIDIA/nccl, src/graph/tuning.cc (latencies, efficiencies) and src/graph/topo.h (bandwidths).
"""

from __future__ import annotations

from math import floor, log2

from collectives.simulation.topology import Cluster

_US = 1e-6
_RING = {"LL": (6.6, 0.6, 1.0, 2.7, 0.5), "LL128": (14.0, 1.9, 2.5, 4.0, 0.92), "Simple": (8.4, 3.4, 5.7, 14.0, 1.0)}
"""By protocol: microseconds of a call, of a step over NVLink, PCIe and the network; the share of the bandwidth."""
_NET_OVERHEAD = {"LL": 1.0, "LL128": 1.0, "Simple": 3.0}
"""Microseconds that a step within a host takes at least, where the ring leaves it."""
_PLATEAU = 1.4
"""Latency of a ring over several hosts, protocol Simple, from 64 bytes per rank and channel on."""
_NVLS_EFFICIENCY, _NVLS_STEP, _TREE_STEP = 0.85, 25.0, 20.9
_NETWORK = 14e-6
"""Seconds between hosts that the constants above are for; a cluster's latency scales them."""
_TREE_SHARE = 45.5 / 48.0
"""Bandwidth of a channel of the NVLS tree on more than two hosts of Hopper, and that of the NIC it has."""


def time(collective: str, nbytes: int, cluster: Cluster) -> tuple[float, str]:
    """Seconds of NCCL's collective, and by which algorithm and protocol.

    Args:
        nbytes: as for `collectives.plan.planner.Planner.choose`: of all chunks together.
    """
    if cluster.ranks == 1:
        return 0.0, "one rank"
    # LL128 needs NVLink's order of stores; NCCL takes it elsewhere if it is the only one.
    protocols = [one for one in cluster.protocols.split(",") if one != "LL128" or cluster.nvlink] or ["LL128"]
    ways = [(_ring(collective, nbytes, cluster, protocol), f"ring, {protocol}") for protocol in protocols]
    if cluster.nvls and collective == "allreduce":
        ways.append(_nvls(nbytes, cluster))
    return min(ways)


def _ring(collective: str, nbytes: int, cluster: Cluster, protocol: str) -> float:
    call, nvlink, pcie, net, share = _RING[protocol]
    size, hosts = cluster.ranks, cluster.hosts
    passes = 2 if collective == "allreduce" else 1
    step = nvlink if cluster.nvlink else pcie
    across = passes * (hosts - 1)
    if hosts > 1:
        step = max(step, _NET_OVERHEAD[protocol])
    latency = call + (passes * (size - 1) - across) * step + across * net * cluster.latency / _NETWORK
    if hosts > 1 and protocol == "Simple":
        latency *= _PLATEAU
    moved = nbytes if collective == "broadcast" else passes * (size - 1) / size * nbytes
    bandwidth = cluster.local_bandwidth if cluster.local > 1 else float("inf")
    if hosts > 1:
        bandwidth = min(bandwidth, cluster.way_out)
    return latency * _US + moved / (bandwidth * share)


def _nvls(nbytes: int, cluster: Cluster) -> tuple[float, str]:
    local, hosts = min(cluster.local, cluster.ranks), cluster.hosts
    within = nbytes * (1 + 1 / local) / (_NVLS_EFFICIENCY * cluster.local_bandwidth)
    if hosts == 1:
        return _NVLS_STEP * _US + within, "NVLS"
    size = cluster.ranks
    across = 2 * (size - 1) / size * nbytes / (cluster.way_out * _TREE_SHARE * (2 if hosts == 2 else 1))
    latency = _NVLS_STEP + 2 * floor(log2(hosts)) * _TREE_STEP * cluster.latency / _NETWORK
    return latency * _US + max(within, across), "NVLS tree"
