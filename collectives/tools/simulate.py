"""``collectives simulate``: predict collectives and training steps on a cluster that you do not have.

collectives simulate collective -np 64 --bytes 100M --cluster h100-rails
collectives simulate planner -np 8,512,65536 --cluster ethernet-10g
collectives simulate step -np 64 --gradients 4M,16M,16M --compute 0.2 --cluster cluster.yaml --html step.html
collectives simulate chakra ring -np 8 --bytes 1M --to traces
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from collectives.base.config import in_units, parse_bytes
from collectives.base.errors import CollectivesError, InvalidArgumentError
from collectives.launch.status import listed
from collectives.launch.usage import Parser
from collectives.schedules import registry
from collectives.simulation import chakra, gradients, rounds, topology
from collectives.simulation.clock import Fault
from collectives.simulation.page import page
from collectives.simulation.prediction import Predictor, exact, schedules
from collectives.simulation.steps import Settings, Step, Workload, changes, simulate_step
from collectives.simulation.topology import MOST_RANKS, PARSERS, SECONDS, Cluster
from collectives.tools.bench import cli
from collectives.tools.bench.cli import algorithm, argument, new_file, size, whole_number

_DEFAULTS = Settings()
_OVERRIDES = [field.name for field in fields(Cluster) if field.type == "float"]
_size, _seconds = argument(PARSERS["ranks"]), argument(SECONDS)
# On all of MOST_RANKS together they are fewer than 2 ** 63.
_nbytes = argument(parse_bytes, "a number of bytes from 1 to 4096G, such as 64K", lambda value: 1 <= value <= 1 << 42)
_share = argument(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
_multiple = argument(float, "a number from 1 to 1e9", lambda value: 1 <= value <= 1e9)
_duration = argument(float, "a number of seconds above 0, at most 1e9", lambda value: 0 < value <= 1e9)


def _several(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """An argparse type of what ``parse`` reads, separated by commas."""
    return lambda text: [parse(word) for word in text.split(",")]


def _pair(of: Callable[[str], Any], mark: str, number: Callable[[str], Any], expected: str) -> Callable[[str], Any]:
    """An argparse type of two parts around a mark."""

    def parse(text: str) -> tuple[Any, Any]:
        part, value = text.rsplit(mark, 1)
        return of(part), number(value)

    return argument(parse, expected)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    flags = _flags()
    asked = flags.parse_args(arguments)
    try:
        return int(asked.run(asked))
    except BrokenPipeError:  # `collectives` ends quietly
        raise
    except (CollectivesError, OSError) as error:
        print(f"{flags.prog}: error: {error}", file=sys.stderr)
        return 2


def _flags() -> argparse.ArgumentParser:
    flags = Parser("collectives simulate", description=__doc__)
    flags.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = flags.add_subparsers(required=True, metavar="COMMAND")
    cluster = Parser(add_help=False)
    cluster.add_argument("--cluster", default="ethernet-10g", help=f"a file, or {', '.join(topology.CLUSTERS)}")
    cluster.add_argument("--local-size", type=_size, dest="local", metavar="N", help="ranks of a host")
    for name in _OVERRIDES:
        flag = f"--{name.replace('_', '-')}"
        cluster.add_argument(flag, type=argument(PARSERS[name]), metavar="X", help=argparse.SUPPRESS)
    cluster.epilog = "--latency, --bandwidth and other fields of a cluster replace its own: docs/simulator.md"

    def command(name: str, run: Any, help: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, parents=[cluster], help=help, description=help, epilog=cluster.epilog)
        parser.set_defaults(run=run)
        return parser

    one = command("collective", _collective, "the time of each algorithm of a collective")
    one.add_argument("collective", nargs="?", default="allreduce", choices=registry.COLLECTIVES)
    one.add_argument("-np", type=_size, help="ranks")
    one.add_argument("--bytes", type=_nbytes, required=True, help="of the input; an allgather's: of the result")
    one.add_argument("--exact", action="store_true", help="play every message, and say when each rank is done")
    one.add_argument("--algorithm", type=algorithm, help="this one only; one of yours: FILE.py:NAME")
    one.add_argument("--segment", type=_nbytes, help="bytes of a chunk in one pipeline unit; implies --exact")
    late = _pair(whole_number(0), "=", _seconds, "RANK=SECONDS, such as 3=0.005")
    lower = _pair(str, "=", _share, "LINK=SHARE, such as 'host 3 out=0.5'")
    lose = _pair(str, "@", _seconds, "LINK@SECONDS, such as 'rank 2 out@0.001'")
    repeated: dict[str, Any] = {"action": "append", "default": []}
    one.add_argument(
        "--late", **repeated, type=late, metavar="RANK=SECONDS", help="start a rank later; implies --exact"
    )
    one.add_argument("--lower", **repeated, type=lower, metavar="LINK=SHARE", help="slow a link: 'host 3 out=0.5'")
    one.add_argument("--lose", **repeated, type=lose, metavar="LINK@SECONDS", help="cut a link: 'rank 2 out@0.001'")

    every = command(
        "planner", _planner, "the planner's choice for each number of ranks and bytes, and the quickest algorithm"
    )
    every.add_argument("-np", type=_several(_size), default="8,64,512,4096,65536", help="ranks (default: %(default)s)")
    every.add_argument("--bytes", type=_several(_nbytes), default="4,64K,1M,16M,256M", help="default: %(default)s")

    step = command("step", _step, "the efficiency of a training step, and what would improve it most")
    step.add_argument("-np", type=_size, help="ranks")
    model = step.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", help="package.module:name of a torch or Keras model, or of a function that makes one")
    model.add_argument("--timeline", help="a recorded timeline; its all-reduces are the gradients")
    model.add_argument(
        "--gradients", type=_several(_nbytes), help="bytes of each gradient, the last layer's first: 4M,16M"
    )
    step.add_argument(
        "--compute", type=_duration, required=True, help="seconds of a step on one rank, without communication"
    )
    step.add_argument("--fusion", type=size, default=_DEFAULTS.fusion, help="bytes that are sent together")
    step.add_argument("--compression", type=_share, default=1.0, help="share of the bytes that is sent, such as 0.5")
    step.add_argument("--no-overlap", action="store_true", help="communicate only after computing")
    step.add_argument("--algorithm", type=algorithm, help="for all gradients (default: the planner's choice)")
    step.add_argument(
        "--slower", type=_multiple, default=1.0, help="how many times longer the slowest rank computes than the others"
    )
    step.add_argument("--late", type=_seconds, default=0.0, help="seconds by which one rank begins later")
    step.add_argument("--html", type=new_file, help="write a page")
    step.add_argument("--plot", type=new_file, help="draw as PNG and SVG; needs matplotlib")
    step.add_argument("--json", type=new_file, help="write everything")

    export = command("chakra", _chakra, "an algorithm's schedules as Chakra execution traces")
    export.add_argument("algorithm", type=algorithm)
    export.add_argument("collective", nargs="?", default="allreduce", choices=registry.COLLECTIVES)
    export.add_argument("-np", type=whole_number(2), help="ranks")
    export.add_argument("--bytes", type=_nbytes, required=True, help="of the input; an allgather's: of the result")
    export.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    return flags


def _cluster(asked: argparse.Namespace, ranks: int | None) -> Cluster:
    return topology.load(asked.cluster, ranks, **{name: getattr(asked, name) for name in (*_OVERRIDES, "local")})


def _collective(asked: argparse.Namespace) -> int:
    cluster = _cluster(asked, asked.np)
    network = cluster.network(dict(asked.lower))
    faults = [Fault(at, link) for link, at in asked.lose]
    late = dict(asked.late)
    if not (asked.exact or asked.segment or late or faults):
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
            f"{1e3 * min(report.times):13.4f} ms  {listed(stuck) if stuck else '-'}"
        )
    if waiting:
        _after_loss(asked, cluster)
    return 0


def _playable(asked: argparse.Namespace, cluster: Cluster) -> list[str]:
    """The algorithm that was asked for, or all that have schedules and serve the cluster."""
    hosts, names = cluster.placement().hosts, []
    for name in dict.fromkeys((*registry.on_host(asked.collective), *registry.on_gpu(asked.collective))):
        one = registry.find(asked.collective, name)
        names += [] if one.native or one.why_not(hosts) else [name]
    if asked.algorithm and asked.algorithm not in names:
        raise InvalidArgumentError(
            f"algorithm={asked.algorithm!r}: expected an algorithm of {asked.collective}: {', '.join(names)} [U42]"
        )
    return [asked.algorithm] if asked.algorithm else names


def _after_loss(asked: argparse.Namespace, cluster: Cluster) -> None:
    print("a lost link: waiting ranks raise once they count the peer as failed (COLLECTIVES_PEER_TIMEOUT, 10 s)")
    if cluster.hosts > 1:
        left = replace(cluster, ranks=cluster.ranks - cluster.local)
        rest = Predictor(left).predict(asked.collective, asked.bytes)
        print(
            f"an elastic job continues with {left.ranks} ranks: {rest.algorithm}, {1e3 * rest.seconds:.4f} ms, "
            f"{rest.busbw / 1e9:.2f} GB/s"
        )


def _planner(asked: argparse.Namespace) -> int:
    print(f"{'collective':14}{'ranks':>7}{'bytes':>10}  {'chosen':24}{'ms':>12}  {'quickest':24}{'ms':>12}")
    for ranks in asked.np:
        predictor = Predictor(_cluster(asked, ranks))
        for collective in registry.COLLECTIVES:
            for nbytes in asked.bytes:
                chosen = predictor.predict(collective, nbytes)
                best = min([chosen, *predictor.every(collective, nbytes)], key=lambda one: one.seconds)
                print(
                    f"{collective:14}{ranks:7}{in_units(nbytes):>10}  {chosen.algorithm:24}{1e3 * chosen.seconds:12.4f}"
                    f"  {best.algorithm:24}{1e3 * best.seconds:12.4f}"
                )
    return 0


def _workload(asked: argparse.Namespace) -> Workload:
    if asked.model is not None:
        sys.path.insert(0, "")  # as `python -m` has it: a model in the current folder
        return Workload(gradients.of_model(asked.model), asked.compute)
    if asked.timeline is not None:
        return Workload(gradients.of_timeline(asked.timeline), asked.compute)
    return Workload(tuple(asked.gradients), asked.compute)


def document(workload: Workload, cluster: Cluster, settings: Settings, name: str) -> dict[str, Any]:
    """A step, the same on fewer and more ranks, and what changes would bring, ready for ``json.dump``."""

    def row(step: Step, **labels: Any) -> dict[str, Any]:
        return {**labels, **asdict(step), "buckets": len(step.buckets), "efficiency": step.efficiency}

    counts = [cluster.local * hosts for hosts in (1 << shift for shift in range(10)) if hosts <= 4 * cluster.hosts]
    scaling = [
        row(simulate_step(workload, Predictor(replace(cluster, ranks=ranks)), settings), ranks=ranks)
        for ranks in counts
        if ranks <= MOST_RANKS
    ]
    return {
        "cluster": name,
        "ranks": cluster.ranks,
        "source": cluster.source or "of one's own",
        "gradients": {"count": len(workload.gradients), "bytes": sum(workload.gradients)},
        "settings": asdict(settings),
        "step": row(simulate_step(workload, Predictor(cluster), settings)),
        "scaling": scaling,
        "changes": [row(step, what=what) for what, step in changes(workload, cluster, settings).items()],
    }


def _step(asked: argparse.Namespace) -> int:
    settings = Settings(
        *(asked.fusion, _DEFAULTS.cycle, not asked.no_overlap, asked.compression, asked.algorithm),
        *(asked.slower, asked.late),
    )
    content = document(_workload(asked), _cluster(asked, asked.np), settings, asked.cluster)
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
    from collectives.tools.bench.plot import drawing, pictures, tidy

    cli.Parser("collectives simulate step", "").check_drawing()
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
    cluster = _cluster(asked, asked.np)
    [name] = _playable(asked, cluster)
    files = chakra.write(*schedules(asked.collective, name, asked.bytes, cluster.placement().hosts), asked.to)
    print(f"{len(files)} traces: {files[0]} ...")
    return 0
