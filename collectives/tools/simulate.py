"""``collectives simulate``: how long collectives and training steps would take on a cluster that one does not have.

collectives simulate collective -np 64 --bytes 100M --cluster h100-rails
collectives simulate planner -np 8,512,65536 --cluster ethernet-10g
collectives simulate step -np 64 --gradients 4M,16M,16M --compute 0.2 --cluster cluster.yaml --html step.html
collectives simulate chakra ring -np 8 --bytes 1M --to traces
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from collectives.base.config import algorithm_name, in_units, parse_bytes
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.schedules import registry
from collectives.schedules.partition import split
from collectives.simulation import chakra, gradients, rounds, topology
from collectives.simulation.clock import Fault
from collectives.simulation.page import page
from collectives.simulation.prediction import Predictor, exact
from collectives.simulation.steps import Settings, Step, Workload, changes, simulate_step
from collectives.simulation.topology import Cluster

_DEFAULTS = Settings()
_SIZES = "4,64K,1M,16M,256M"
_OVERRIDES = (
    "latency",
    "bandwidth",
    "local_latency",
    "local_bandwidth",
    "uplink",
    "leaf_uplink",
    "reduction",
    "message",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    flags = _flags()
    asked = flags.parse_args(arguments)
    try:
        if getattr(asked, "algorithm", None):
            asked.algorithm = algorithm_name(asked.algorithm)
        return int(asked.run(asked))
    except BrokenPipeError:  # `collectives` ends quietly
        raise
    except (CollectivesError, OSError) as error:
        flags.error(str(error))


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser("collectives simulate", description=__doc__, formatter_class=_Text)
    commands = flags.add_subparsers(required=True, metavar="COMMAND")
    cluster = argparse.ArgumentParser(add_help=False)
    cluster.add_argument("--cluster", default="ethernet-10g", help=f"a file, or {', '.join(topology.CLUSTERS)}")
    cluster.add_argument("--local-size", type=int, dest="local", metavar="N", help="ranks of a host")
    for name in _OVERRIDES:
        cluster.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=argparse.SUPPRESS)
    cluster.epilog = "--latency, --bandwidth and other fields of a cluster replace its own: docs/simulator.md"

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, parents=[cluster], help=help, description=help, epilog=cluster.epilog)
        parser.set_defaults(run=run)
        return parser

    one = command("collective", _collective, "the time of each algorithm of a collective")
    one.add_argument("collective", nargs="?", default="allreduce", choices=registry.COLLECTIVES)
    one.add_argument("-np", type=int, help="ranks")
    one.add_argument("--bytes", type=parse_bytes, required=True, help="of the input; an allgather's: of the result")
    one.add_argument("--exact", action="store_true", help="play every message, and say when each rank is done")
    one.add_argument("--algorithm", help="this one only; one of yours: FILE.py:NAME")
    one.add_argument("--segment", type=parse_bytes, help="with --exact: bytes of a chunk in one pipeline unit")
    one.add_argument("--late", action="append", default=[], metavar="RANK=SECONDS", help="with --exact")
    one.add_argument("--lower", action="append", default=[], metavar="LINK=SHARE", help="as 'host 3 out=0.5'")
    one.add_argument("--lose", action="append", default=[], metavar="LINK@SECONDS", help="as 'rank 2 out@0.001'")

    every = command("planner", _planner, "what the planner would choose by ranks and bytes, and the quickest")
    every.add_argument("-np", default="8,64,512,4096,65536", help="numbers of ranks (default: %(default)s)")
    every.add_argument("--bytes", default=_SIZES, help="sizes (default: %(default)s)")

    step = command("step", _step, "a training step: its efficiency, and what would help most")
    step.add_argument("-np", type=int, help="ranks")
    model = step.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="package.module:name of a torch or Keras model, or of what makes one")
    model.add_argument("--timeline", help="a recorded timeline, whose all-reduces are the gradients")
    model.add_argument("--gradients", help="bytes of each gradient, the last layer first, such as 4M,16M")
    step.add_argument("--compute", type=float, required=True, help="seconds of a step of one rank by itself")
    step.add_argument("--fusion", type=parse_bytes, default=_DEFAULTS.fusion, help="bytes that are sent as one")
    step.add_argument("--compression", type=float, default=1.0, help="share of the bytes that is sent")
    step.add_argument("--no-overlap", action="store_true", help="send after computing")
    step.add_argument("--algorithm", help="for all gradients (default: the planner's choice)")
    step.add_argument("--slower", type=float, default=1.0, help="computing time of the slowest rank by the others'")
    step.add_argument("--late", type=float, default=0.0, help="seconds by which a rank begins later")
    step.add_argument("--html", type=Path, help="write a page")
    step.add_argument("--plot", type=Path, help="draw as PNG and SVG; needs matplotlib")
    step.add_argument("--json", type=Path, help="write everything")

    export = command("chakra", _chakra, "an algorithm's schedules as Chakra execution traces")
    export.add_argument("algorithm")
    export.add_argument("collective", nargs="?", default="allreduce", choices=registry.COLLECTIVES)
    export.add_argument("-np", type=int, help="ranks")
    export.add_argument("--bytes", type=parse_bytes, required=True, help="of the input; an allgather's: of the result")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    return flags


class _Text(argparse.RawDescriptionHelpFormatter):
    pass


def _cluster(asked: argparse.Namespace, ranks: int | None = None) -> Cluster:
    changed = {name: getattr(asked, name) for name in (*_OVERRIDES, "local")}
    return topology.load(asked.cluster, ranks or asked.np, **changed)


def _pairs(entries: Sequence[str], mark: str, flag: str) -> list[tuple[str, float]]:
    try:
        return [(name, float(value)) for name, value in (entry.rsplit(mark, 1) for entry in entries)]
    except ValueError:
        raise InvalidArgumentError(f"{flag} {' '.join(entries)}: expected NAME{mark}NUMBER [U41]") from None


def _collective(asked: argparse.Namespace) -> int:
    cluster = _cluster(asked)
    network = cluster.network(dict(_pairs(asked.lower, "=", "--lower")))
    faults = [Fault(at, link) for link, at in _pairs(asked.lose, "@", "--lose")]
    late = {int(rank): seconds for rank, seconds in _pairs(asked.late, "=", "--late")}
    if not (asked.exact or late or faults):
        predictor = Predictor(cluster, network)
        chosen = predictor.predict(asked.collective, asked.bytes, asked.algorithm)
        rows = [chosen] if asked.algorithm else predictor.every(asked.collective, asked.bytes)
        print(f"{'algorithm':24} {'ms':>12} {'bus GB/s':>9}")
        for row in rows:
            print(f"{row.algorithm:24} {1e3 * row.seconds:12.4f} {row.busbw / 1e9:9.2f}")
        print(f"the planner chooses {chosen.algorithm}: {chosen.why}")
        with suppress(InvalidArgumentError):  # NCCL's own
            print(f"{rounds.fullest_link(asked.collective, chosen.algorithm, network)} is the fullest link")
        return 0
    names = _playable(asked, cluster)
    print(f"{'algorithm':24} {'ms':>12} {'bus GB/s':>9} {'messages':>9} {'first rank done':>16}  waiting")
    waiting: set[int] = set()
    for name in names:
        report = exact(asked.collective, name, asked.bytes, network, asked.segment, late=late, faults=faults)
        stuck = [rank for rank, at in enumerate(report.times) if at == float("inf")]
        waiting |= set(stuck)
        print(
            f"{name:24} {1e3 * report.total:12.4f} {report.busbw / 1e9:9.2f} {report.messages:9} "
            f"{1e3 * min(report.times):13.4f} ms  {_ranks(stuck)}"
        )
    if waiting:
        _after_loss(asked, cluster)
    return 0


def _playable(asked: argparse.Namespace, cluster: Cluster) -> list[str]:
    """The algorithm that was asked for, or all that have schedules and serve the cluster."""
    every = [
        registry.find(asked.collective, name)
        for name in dict.fromkeys((*registry.on_host(asked.collective), *registry.on_gpu(asked.collective)))
    ]
    names = [each.name for each in every if not each.native and not each.why_not(cluster.placement().hosts)]
    if asked.algorithm and asked.algorithm not in names:
        raise InvalidArgumentError(f"algorithm={asked.algorithm!r}: {asked.collective} has {', '.join(names)} [U42]")
    return [asked.algorithm] if asked.algorithm else names


def _ranks(ranks: Sequence[int]) -> str:
    return f"ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}" if ranks else "-"


def _after_loss(asked: argparse.Namespace, cluster: Cluster) -> None:
    print("a lost link: the waiting ranks raise when the peer counts as failed (COLLECTIVES_PEER_TIMEOUT, 10 s)")
    if cluster.hosts > 1:
        left = replace(cluster, ranks=cluster.ranks - cluster.local)
        rest = Predictor(left).predict(asked.collective, asked.bytes)
        print(
            f"an elastic job goes on with {left.ranks} ranks: {rest.algorithm}, {1e3 * rest.seconds:.4f} ms, "
            f"{rest.busbw / 1e9:.2f} GB/s"
        )


def _planner(asked: argparse.Namespace) -> int:
    sizes = [parse_bytes(word) for word in asked.bytes.split(",")]
    print(f"{'collective':14}{'ranks':>7}{'bytes':>10}  {'chosen':24}{'ms':>12}  {'quickest':24}{'ms':>12}")
    for ranks in map(int, asked.np.split(",")):
        predictor = Predictor(_cluster(asked, ranks))
        for collective in registry.COLLECTIVES:
            for nbytes in sizes:
                chosen = predictor.predict(collective, nbytes)
                best = min([chosen, *predictor.every(collective, nbytes)], key=lambda one: one.seconds)
                print(
                    f"{collective:14}{ranks:7}{in_units(nbytes):>10}  {chosen.algorithm:24}{1e3 * chosen.seconds:12.4f}"
                    f"  {best.algorithm:24}{1e3 * best.seconds:12.4f}"
                )
    return 0


def _workload(asked: argparse.Namespace) -> Workload:
    if asked.model:
        sys.path.insert(0, "")  # as `python -m` has it: a model in the current folder
        return Workload(gradients.of_model(asked.model), asked.compute)
    if asked.timeline:
        return Workload(gradients.of_timeline(asked.timeline), asked.compute)
    return Workload(tuple(map(parse_bytes, asked.gradients.split(","))), asked.compute)


def document(workload: Workload, cluster: Cluster, settings: Settings, name: str) -> dict[str, Any]:
    """A step, the same on fewer and more ranks, and what changes would bring, ready for ``json.dump``."""

    def row(step: Step, **labels: Any) -> dict[str, Any]:
        return {**labels, **asdict(step), "buckets": len(step.buckets), "efficiency": step.efficiency}

    counts = [cluster.local * hosts for hosts in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if hosts <= 4 * cluster.hosts]
    scaling = [
        row(simulate_step(workload, Predictor(replace(cluster, ranks=ranks)), settings), ranks=ranks)
        for ranks in counts
    ]
    return {
        "cluster": name,
        "ranks": cluster.ranks,
        "source": cluster.source or "of one's own",
        "gradients": {"count": len(workload.gradients), "bytes": sum(workload.gradients)},
        "settings": asdict(settings),
        "step": row(simulate_step(workload, Predictor(cluster), settings)),
        "scaling": scaling,
        "changes": [row(change.step, what=change.what) for change in changes(workload, cluster, settings)],
    }


def _step(asked: argparse.Namespace) -> int:
    settings = Settings(
        *(asked.fusion, _DEFAULTS.cycle, not asked.no_overlap, asked.compression, asked.algorithm),
        *(asked.slower, asked.late),
    )
    content = document(_workload(asked), _cluster(asked), settings, asked.cluster)
    step, sent = content["step"], content["gradients"]
    print(
        f"{content['ranks']} ranks of {content['cluster']}, {sent['count']} gradients of {in_units(sent['bytes'])}: "
        f"{1e3 * step['step']:.2f} ms a step, {1e3 * step['exposed']:.2f} ms of it exposed, efficiency "
        f"{step['efficiency']:.1%}"
    )
    print(f"\n{'ranks':>8}{'step ms':>12}{'communication ms':>18}{'efficiency':>12}")
    for row in content["scaling"]:
        print(f"{row['ranks']:8}{1e3 * row['step']:12.2f}{1e3 * row['communication']:18.2f}{row['efficiency']:12.1%}")
    print(f"\n{'what would change it':48}{'step ms':>12}{'efficiency':>12}{'buckets':>9}")
    for row in content["changes"]:
        print(f"{row['what']:48}{1e3 * row['step']:12.2f}{row['efficiency']:12.1%}{row['buckets']:9}")
    if asked.json:
        asked.json.write_text(json.dumps(content, indent=1))
    if asked.html:
        asked.html.write_text(page(content), encoding="utf-8")
    if asked.plot:
        print(*_draw(content, asked.plot))
    return 0


def _draw(content: dict[str, Any], file: Path) -> tuple[Path, Path]:
    from collectives.tools.bench.cli import Parser
    from collectives.tools.bench.plot import drawing, pictures, tidy

    Parser("collectives simulate step", "").check_drawing()
    with drawing(file, 2, (12, 4.5), f"A step on {content['ranks']} ranks of {content['cluster']}") as (_, panels):
        scaling, gains = panels
        ranks = [row["ranks"] for row in content["scaling"]]
        scaling.plot(ranks, [100 * row["efficiency"] for row in content["scaling"]], marker="o", color="#0072B2")
        scaling.set_xscale("log", base=2)
        scaling.set_xticks(ranks, [str(count) for count in ranks], fontsize=8)
        scaling.set_ylim(0, 105)
        scaling.set_xlabel("ranks")
        scaling.set_title("efficiency (%), predicted", fontsize=10, loc="left")
        rows = content["changes"][::-1]
        gains.barh([row["what"] for row in rows], [1e3 * row["step"] for row in rows], color="#0072B2")
        gains.axvline(1e3 * content["step"]["step"], color="#D55E00")
        gains.set_title("a step after each change (ms); line: as it is", fontsize=10, loc="left")
        tidy(scaling, "y")
        tidy(gains, "x")
    return pictures(file)


def _chakra(asked: argparse.Namespace) -> int:
    cluster = _cluster(asked)
    [name] = _playable(asked, cluster)
    schedule = registry.find(asked.collective, name).schedules(cluster.network().hosts or ())
    whole = asked.bytes * (cluster.ranks if asked.collective == "alltoall" else 1)
    files = chakra.write(map(schedule, range(cluster.ranks)), split(whole, schedule(0).chunks), asked.to)
    print(f"{len(files)} traces: {files[0]} ...")
    return 0
