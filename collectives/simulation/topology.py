"""Clusters: how many ranks a host has, what connects them, and what is published of it.

A cluster is one of `CLUSTERS`, or read from a file: YAML of one's own, what ``nvidia-smi topo -m`` prints, NCCL's
topology (``NCCL_TOPO_DUMP_FILE``), or what ``collectivesrun --doctor -H a,b --json`` has measured.

    # a cluster of one's own: a base, and what differs from it
    base: h100-rails
    ranks: 256
    leaf: 4
    leaf_uplink: 800e9

Bandwidths in bytes per second and direction, latencies in seconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from collectives.base import config
from collectives.base.errors import InvalidArgumentError
from collectives.launch.options import parsed
from collectives.plan.planner import Placement
from collectives.simulation.links import Network
from collectives.simulation.rounds import host_lists

MOST_RANKS = 1 << 20
SECONDS = config.parser(float, "a number of seconds from 0 to 1e9", lambda value: 0 <= value <= 1e9)
_RATE = config.parser(float, "a number of bytes per second, 1 or more", lambda value: 1 <= value < inf)
_LIMIT = config.parser(float, "a number of bytes per second, 1 or more, or inf", lambda value: value >= 1)
_PROTOCOLS = config.parser(
    str, "some of LL,LL128,Simple", lambda text: set(text.split(",")) <= {"LL", "LL128", "Simple"}
)


def _count(least: int) -> Callable[[str], int]:
    return config.parser(
        int, f"a whole number from {least} to {MOST_RANKS}", lambda value: least <= value <= MOST_RANKS
    )


def _field(default: Any, parse: Callable[[str], Any]) -> Any:
    return field(default=default, metadata={"parse": parse})


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal hosts, and what connects them.

    Attributes:
        ranks: of the job; the last host may have fewer than ``local``.
        local: ranks of a host, or of an NVLink domain.
        latency, bandwidth: between hosts; the bandwidth of each rank's own way there.
        local_latency, local_bandwidth: between ranks of a host.
        uplink: bandwidth of a host's way out, which its ranks share.
        leaf, leaf_uplink: hosts of a leaf switch (0: one switch), and the bandwidth of its way up.
        reduction: bytes that a rank combines per second.
        message: seconds that a rank spends on each message that it sends.
        overhead: seconds of a call besides its messages.
        gpus: whether tensors are on GPUs, one for each rank; ``nvlink``, ``nvls``: what connects these.
        protocols: those that NCCL may use, as in NCCL_PROTO.
        source: where the figures come from.
    """

    ranks: int = _field(8, _count(1))
    local: int = _field(1, _count(1))
    latency: float = _field(5e-6, SECONDS)
    bandwidth: float = _field(12.5e9, _RATE)
    local_latency: float = _field(1e-6, SECONDS)
    local_bandwidth: float = _field(10e9, _RATE)
    uplink: float = _field(inf, _LIMIT)
    leaf: int = _field(0, _count(0))
    leaf_uplink: float = _field(inf, _LIMIT)
    reduction: float = _field(inf, _LIMIT)
    message: float = _field(0.0, SECONDS)
    overhead: float = _field(0.0, SECONDS)
    gpus: bool = _field(False, config.parse_bool)
    nvlink: bool = _field(False, config.parse_bool)
    nvls: bool = _field(False, config.parse_bool)
    protocols: str = _field("LL,LL128,Simple", _PROTOCOLS)
    source: str = _field("", str)

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.local)

    @property
    def way_out(self) -> float:
        """Bandwidth out of a host, of all its ranks together."""
        leaf = self.leaf_uplink / self.leaf if self.leaf and self.hosts > self.leaf else inf
        return min(self.uplink, self.local * self.bandwidth, leaf)

    def network(self, lowered: Mapping[str, float] | None = None) -> Network:
        """The network for `clock.simulate` and `rounds.estimate`; ``lowered``: as of `Network`."""
        return Network(
            *(self.latency, self.bandwidth, host_lists(self.ranks, self.local)),
            *(self.local_latency, self.local_bandwidth, self.uplink, self.reduction),
            leaf=self.leaf,
            leaf_uplink=self.leaf_uplink,
            message=self.message,
            lowered=lowered or {},
        )

    def placement(self) -> Placement:
        """What the planner is told: ranks that share memory on their hosts, and TCP between these."""
        hosts = tuple(map(tuple, host_lists(self.ranks, self.local)))
        several = len(hosts) > 1
        return Placement(0, self.ranks, hosts, True, True, True, carries=several, network="tcp" if several else "")


PARSERS: dict[str, Callable[[str], Any]] = {one.name: one.metadata["parse"] for one in fields(Cluster)}
"""By field of a cluster: what reads it, and says in its docstring what it expects."""
_NVLINK = {60: 18.0e9, 70: 20.0e9, 80: 20.0e9, 86: 12.0e9, 90: 20.6e9, 100: 40.1e9}
"""Bytes per second of one NVLink, as NCCL counts on, by compute capability: NVIDIA/nccl, src/graph/topo.h."""
_PCIE = 12.0e9
"""PCIe of generation 3, 16 lanes: PCI_BW of the same file. Later generations have two to four times that."""
_LINKS = {12: 80, 18: 90}
"""NVLinks of a GPU -> its compute capability, where nothing else says it: A100 12, H100 18 (datasheets)."""
_NET = 14e-6
"""Seconds of a step of a ring over the network: NVIDIA/nccl, src/graph/tuning.cc, protocol Simple."""
_IB = (
    "370.8 GB/s of NVLink (18 x 20.6: NCCL's topo.h), 48 GB/s of a 400 Gbit/s NIC (its search.cc), 14 us between "
    "hosts, 3.4 us within and 1 us a message (its tuning.cc)"
)
_H100 = Cluster(32, 8, _NET, 48e9, 3.4e-6, 370.8e9, message=1e-6, gpus=True, nvlink=True, nvls=True)
_TCP = Cluster(
    *(8, 1, 30e-6, 1.19e9),
    reduction=5e9,
    message=20e-6,
    overhead=60e-6,
    source="line rate less 5 % of headers; 20 us a message: ours, docs/simulator.md; latency assumed",
)

CLUSTERS = {
    "h100-rails": replace(_H100, source=f"HGX H100, a NIC per GPU: {_IB}"),
    "h100-fat-tree-4to1": replace(
        _H100,
        ranks=1024,
        leaf=32,
        leaf_uplink=32 * 8 * 48e9 / 4,
        source=f"the same, 32 hosts to a leaf switch, whose ways up carry a quarter: {_IB}",
    ),
    "a100-rails": replace(
        _H100,
        bandwidth=24e9,
        local_bandwidth=240e9,
        nvls=False,
        source="HGX A100: 12 x 20 GB/s of NVLink (NCCL's topo.h), 200 Gbit/s NICs; the rest as of H100",
    ),
    "gb200-nvl72": replace(
        _H100,
        ranks=72,
        local=72,
        local_bandwidth=721.8e9,
        nvls=False,
        source="18 x 40.1 GB/s of NVLink 5 (NCCL's topo.h); NVLS left out: its efficiency over 72 is unknown",
    ),
    "p100-25gbit": replace(
        _H100,
        ranks=512,
        local=4,
        bandwidth=3.125e9,
        local_latency=5.7e-6,
        local_bandwidth=_PCIE,
        uplink=3.125e9,
        nvlink=False,
        nvls=False,
        source="arXiv:1802.05799: hosts of 4 Pascal GPUs, 25 Gbit/s; PCIe 12 GB/s (NCCL's topo.h)",
    ),
    "ethernet-10g": _TCP,
    "ethernet-100g": replace(_TCP, bandwidth=11.9e9, latency=15e-6),
}
"""By name."""


def load(name: str, ranks: int | None = None, **changes: Any) -> Cluster:
    """A cluster by name or file.

    Args:
        name: one of `CLUSTERS`, or a path.
        ranks: of the job; None: as many as the cluster has.
        changes: fields that differ; None: they do not.

    Raises:
        InvalidArgumentError: there is no such cluster or file, or it cannot be understood.
    """
    cluster = CLUSTERS.get(name) or _read(name)
    changes = {key: value for key, value in changes.items() if value is not None}
    return _checked(replace(cluster, ranks=cluster.ranks if ranks is None else ranks, **changes), name)


def _checked(cluster: Cluster, name: str) -> Cluster:
    """The cluster with each field as its parser reads it: YAML takes 25e-6, which has no point, for a text."""
    values = {}
    for key, parse in PARSERS.items():
        try:
            values[key] = parsed(parse, str(getattr(cluster, key)))
        except ValueError as error:
            raise InvalidArgumentError(f"cluster {name!r}: {key}: {error} [U38]") from None
    return replace(cluster, **values)


def _read(path: str) -> Cluster:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        problem = error.strerror if isinstance(error, OSError) else f"no text in UTF-8 ({error})"
        raise InvalidArgumentError(
            f"cluster {path!r}: {problem}; expected one of {', '.join(CLUSTERS)}, or a file [U39]"
        ) from None
    read: Callable[[str], Cluster] = partial(_own, path=path)
    expected = "'field: value' on each line, such as 'ranks: 64'"
    if re.match(r"\s*<", text):
        expected, read = "NCCL's topology in XML", nccl_topology
    elif re.match(r"\s*\[", text):
        expected, read = "what collectivesrun --doctor -H a,b --json prints", doctors_findings
    elif re.search(r"^\s*GPU0\b", text, re.MULTILINE):
        expected, read = "what nvidia-smi topo -m prints", gpu_matrix
    try:
        return read(text)
    except Exception as error:  # whatever a parser raises on a file that is something else
        problem = " ".join(f"{'no ' * isinstance(error, KeyError)}{error}".split())
        raise InvalidArgumentError(f"cluster {path!r}: expected {expected}: {problem} [U40]") from error


def _own(text: str, path: str) -> Cluster:
    import yaml

    stated = yaml.safe_load(text)  # which raises where lists are nested too deeply
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        raise ValueError("found an alias (*)")  # lists of which grow without end where they are shown
    if not isinstance(stated, dict):
        raise ValueError(f"found {stated!r:.40}")
    if unknown := stated.keys() - PARSERS.keys() - {"base"}:
        raise ValueError(f"unknown {', '.join(sorted(map(str, unknown)))}; expected base, {', '.join(PARSERS)}")
    if (base := stated.pop("base", None)) not in [None, *CLUSTERS]:
        raise ValueError(f"base: {base!r}: expected one of {', '.join(CLUSTERS)}")
    return replace(CLUSTERS[base] if base else Cluster(), **{"source": path, **stated})


def gpu_matrix(text: str) -> Cluster:
    """A host from what ``nvidia-smi topo -m`` prints: GPUs, and the NVLinks between two. Of NICs it has no rates."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*GPU\d+\s+\S", line)]
    rows = [row for row in rows if not row[1].startswith("GPU")]  # the heading
    ways = [way for number, row in enumerate(rows) for way in row[1 : 1 + len(rows)][number + 1 :]]
    links = [int(way[2:]) for way in ways if re.fullmatch(r"NV\d+", way)]
    nvlink = bool(links) and len(links) == len(ways)
    count = min(links) if nvlink else 0
    generation = _LINKS.get(count, 70)  # V100: 6
    return Cluster(
        *(len(rows), len(rows), _NET, 12.5e9, 3.4e-6, count * _NVLINK[generation] if nvlink else _PCIE),
        gpus=True,
        nvlink=nvlink,
        nvls=nvlink and generation >= 90,
        source="nvidia-smi topo -m; bandwidths: NCCL's topo.h; NICs: assumed 100 Gbit/s each",
    )


def nccl_topology(text: str) -> Cluster:
    """A host from NCCL's XML: GPUs, their NVLinks, and the NICs with their rates."""
    system = ElementTree.fromstring(text)
    gpus = list(system.iter("gpu"))
    if not gpus:
        raise ValueError("no <gpu> in it; expected what NCCL_TOPO_DUMP_FILE names")
    generation = min(int(gpu.attrib["sm"]) for gpu in gpus)
    known = max((sm for sm in _NVLINK if sm <= generation), default=60)
    links = min(sum(int(link.attrib["count"]) for link in gpu.iter("nvlink")) for gpu in gpus)
    rates = [float(net.attrib["speed"]) * 1e6 / 8 for net in system.iter("net")]
    way_out = sum(rates) or 12.5e9
    return Cluster(
        *(len(gpus), len(gpus), _NET, max(way_out / len(gpus), max(rates, default=0.0)), 3.4e-6),
        links * _NVLINK[known] if links else _PCIE,
        way_out,
        gpus=True,
        nvlink=links > 0,
        nvls=links > 0 and generation >= 90,
        source="NCCL's topology file; NVLink: NCCL's topo.h",
    )


def doctors_findings(text: str) -> Cluster:
    """Hosts of one rank from ``collectivesrun --doctor -H ... --json``: the median latency, the lowest bandwidth."""
    findings = json.loads(text)
    found = [
        match
        for finding in findings
        if finding["check"] == "connection" and (match := re.search(r": ([\d.]+) ms, ([\d.]+) MB/s$", finding["found"]))
    ]
    if not found:
        raise ValueError("no measured connection in it; expected what collectivesrun --doctor -H a,b --json prints")
    hosts = {finding["host"] for finding in findings if finding["check"] == "connection"}
    latency = median(float(match[1]) for match in found) * 1e-3
    bandwidth = min(float(match[2]) for match in found) * 1e6
    return Cluster(len(hosts), 1, latency, bandwidth, source="collectivesrun --doctor", overhead=2 * latency)
