"""Ours beside its peers, everything in one run, and the page that shows it: ``python -m benchmarks.compare``.

Each part is a benchmark of this folder in processes of its own, in which all contestants take turns: every collective
beside each MPI and gloo on one host, all-reduces between hosts, training steps beside DistributedDataParallel and
MultiWorkerMirroredStrategy, JAX arrays beside mpi4jax; on a GPU beside NCCL. What cannot run here is said in the page,
with its last line.

    python -m benchmarks.compare --mpi "Open MPI=.venv/bin/python" --mpi "MPICH=.venv-mpich/bin/python" --output DIR
    python -m benchmarks.compare --report DIR docs/peers.md     # the page again, and its pictures beside it
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from collectives.base.config import parse_bytes
from collectives.tools.bench.measure import OURS
from collectives.tools.bench.plot import plot, short_bytes

ROOT = Path(__file__).resolve().parents[1]
COLLECTIVES = ("allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "sendrecv")
LARGEST = {2: "256M", 4: "64M", 8: "16M", 16: "4M"}
"""By number of ranks, so that all buffers of all contestants fit into memory."""
IN_PLACE = ("allreduce", "broadcast")
"""Compared in place; the others out of place, which is how each of them is mostly called."""
PRIVATE = f"{OURS}, private"
LOST = 0.95
"""A peer that takes less than this share of our time is faster."""
_TIMEOUT = 900


@dataclass(frozen=True)
class Part:
    """One process of the run. ``file``: the name of what it writes; ``json``: whether it also writes its figures."""

    file: str
    title: str
    command: list[str]
    json: bool = True

    def run(self, output: Path) -> None:
        command = [*self.command, "-J", str(output / f"{self.file}.json")] if self.json else self.command
        folder = os.path.dirname(self.command[0])
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        try:
            ended = subprocess.run(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            text = ended.stdout if ended.returncode == 0 else f"{ended.stdout}\n{failed(ended.stderr)}"
        except subprocess.TimeoutExpired:
            text = f"did not end within {_TIMEOUT} s"
        (output / f"{self.file}.txt").write_text(f"# {self.title}\n$ {' '.join(command)}\n{text}")


def failed(printed: str) -> str:
    lines = [line for line in printed.splitlines() if line.strip()]
    return f"could not run: {lines[-1] if lines else 'it printed nothing'}"


def launched(python: str, ranks: int, program: str, *options: str) -> list[str]:
    launch = [python, "-m", "collectives.launch", "--launcher", "mpi", "--no-tag", "-np", str(ranks)]
    return [*launch, python, "-m", f"benchmarks.{program}", *options]


def parts(chosen: argparse.Namespace) -> Iterator[Part]:
    """Everything that the run consists of."""
    for ranks in chosen.ranks:
        for collective in chosen.collectives:
            for number, (name, python) in enumerate(chosen.mpi):
                largest = min(LARGEST[ranks], chosen.largest, key=parse_bytes)
                peers = "mpi,gloo" if number == 0 else "mpi"
                sizes = ["-b", "4", "-e", largest, "-f", "4", "-n", str(chosen.calls), "-w", "2"]
                options = [*sizes, "--memory", "mapped,private", "--peers", peers]
                command = launched(python, ranks, collective, *options)
                yield Part(f"{collective}-{ranks}-{number}", f"{collective}, {ranks} ranks, {name}", command)
        for number, (name, python) in enumerate(chosen.mpi):
            command = launched(python, ranks, "latency", "-n", "9", "--peers", "mpi,gloo" if number == 0 else "mpi")
            yield Part(f"latency-{ranks}-{number}", f"small all-reduces back to back, {ranks} ranks, {name}", command)
    python = chosen.mpi[0][1]
    if chosen.cluster:
        for setup in ("2x1", "4x1", "2x2"):
            command = [python, "-m", "benchmarks.cluster", "--cluster", chosen.cluster, "--setup", setup]
            yield Part(f"hosts-{setup}", f"between hosts, {setup}", [*command, "--network", "mpi,tcp"], json=False)
    if chosen.frameworks:
        for model in ("resnet50", "mlp"):
            command = launched(python, 2, "torch_step", "--model", model, "--peers", "ddp,ddp-ours")
            yield Part(f"torch-{model}", f"training step in torch, {model}", command)
        for model in ("resnet50", "tiny"):
            command = launched(python, 2, "tf_step", "--model", model, "--peers", "strategy")
            yield Part(f"tensorflow-{model}", f"gradients in TensorFlow, {model}", command)
        yield Part("jax", "JAX arrays", launched(python, 2, "jax_bandwidth"))
    if chosen.gpu:
        for collective in COLLECTIVES[:-1]:
            options = ["--device", "cuda", "-b", "4K", "-e", "256M", "-f", "4", "--peers", "nccl,torch"]
            yield Part(f"gpu-{collective}", f"{collective} on a GPU", launched(python, 2, collective, *options))


def report(output: Path, page: Path) -> None:
    """Write the page of a run, and its pictures beside it."""
    run = json.loads((output / "run.json").read_text())
    lines: list[str] = []
    compared: list[Compared] = []
    for collective in COLLECTIVES:
        for ranks in LARGEST:
            documents = {
                name: json.loads(file.read_text())
                for number, name in enumerate(run["mpi"])
                if (file := output / f"{collective}-{ranks}-{number}.json").exists()
            }
            if documents:
                lines += [f"### {collective}, {ranks} ranks\n", *table(documents, collective, ranks, compared)]
                if ranks == 2:
                    picture = page.parent / "pictures" / f"peers-{collective}.svg"
                    picture.parent.mkdir(exist_ok=True)
                    plot(joined(documents), picture)
                    picture.with_suffix(".png").unlink()
                    lines.append(f"![Bus bandwidth of {collective} by size](pictures/{picture.name})\n")
    lines += ["## Back to back, between hosts, in frameworks, and what could not run\n"]
    for file in sorted(output.glob("*.txt")):
        title, command, *printed = file.read_text().splitlines()
        if not file.stem.startswith(COLLECTIVES):
            shown = "\n".join(printed).strip()
            words = " ".join(Path(word).name if word.startswith("/") else word for word in command.split())
            lines.append(f"### {title.removeprefix('# ')}\n\n```text\n{words}\n{shown}\n```\n")
        elif not file.with_suffix(".json").exists():
            lines.append(f"{title.removeprefix('# ')}: {printed[-1]}\n")
    lost = ["## Where we lose\n", *counted(compared), "", *losses(compared), "", "## On one host\n"]
    page.write_text("\n".join([PREFACE.format(**run), *lost, *lines]))


@dataclass(frozen=True)
class Compared:
    """A peer's times as shares of ours by the bytes of a tensor; ``memory``: whose NumPy arrays ours were."""

    collective: str
    ranks: int
    memory: str
    peer: str
    shares: dict[int, float]


def table(documents: dict[str, Any], collective: str, ranks: int, compared: list[Compared]) -> list[str]:
    """Rows of sizes: our microseconds, and the time of each peer divided by ours in the same run; the peers' columns
    are added to ``compared``."""
    mode = "in-place" if collective in IN_PLACE else "out-of-place"
    ours: dict[int, float] = {}
    ratios: dict[str, dict[int, float]] = {"ours, private": {}}
    for name, document in documents.items():
        records = [record for record in document["records"] if record["mode"] == mode and record["time"]]
        private = {record["size"]: _ratio(record) for record in records if record["contestant"] == PRIVATE}
        ratios["ours, private"] |= private | ratios["ours, private"]
        ours |= {record["size"]: record["time"]["median"] for record in records if record["contestant"] == OURS} | ours
        for contestant, peer in (("mpi", name), ("gloo", "gloo")):
            shares = {record["size"]: _ratio(record) for record in records if record["contestant"] == contestant}
            if shares:
                ratios[peer] = shares
                beside_private = {size: share / private[size] for size, share in shares.items()}
                compared.append(Compared(collective, ranks, "mapped", peer, shares))
                compared.append(Compared(collective, ranks, "private", peer, beside_private))
    rows = table_rows(["bytes", "ours, mapped (µs)", *ratios])
    for size in sorted(ours):
        cells = [f"{column[size]:.2f}" if size in column else "" for column in ratios.values()]
        rows += table_rows([short_bytes(size), f"{ours[size]:,.1f}", *cells], is_head=False)
    return [*rows, ""]


def table_rows(cells: Sequence[str], is_head: bool = True) -> list[str]:
    return [f"| {' | '.join(cells)} |", *(["|---" * len(cells) + "|"] if is_head else [])]


def _ratio(record: dict[str, Any]) -> float:
    return float(record["ratio"]["median"])


def counted(compared: list[Compared]) -> list[str]:
    """For each peer and class of sizes: in how many cases ours took less time, as long, and more."""
    rows = table_rows(
        ["number of cases in which we are faster, about equal, slower", "up to 16 KiB", "up to 1 MiB", "larger"]
    )
    for peer in dict.fromkeys(each.peer for each in compared):
        cells = []
        for above, largest in ((0, 16 << 10), (16 << 10, 1 << 20), (1 << 20, 1 << 40)):
            shares = [
                share
                for each in compared
                for size, share in each.shares.items()
                if each.peer == peer and above < size <= largest
            ]
            won, lost = sum(share > 1 / LOST for share in shares), sum(share < LOST for share in shares)
            cells.append(f"{won}, {len(shares) - won - lost}, {lost}")
        rows += table_rows([peer, *cells], is_head=False)
    return rows


def losses(compared: list[Compared]) -> list[str]:
    """A row for each collective, number of ranks and memory: at which sizes a peer is faster, and how much at most."""
    peers = list(dict.fromkeys(each.peer for each in compared if _lost(each.shares)))
    rows = table_rows(["sizes at which we are slower than", *peers])
    places = dict.fromkeys((each.collective, each.ranks, each.memory) for each in compared)
    for collective, ranks, memory in places:
        cells = {
            each.peer: _lost(each.shares)
            for each in compared
            if (each.collective, each.ranks, each.memory) == (collective, ranks, memory)
        }
        if any(cells.values()):
            name = f"{collective}, {ranks} ranks, {memory}"
            rows += table_rows([name, *(cells.get(peer, "") for peer in peers)], is_head=False)
    return rows


def _lost(shares: dict[int, float]) -> str:
    """Such as "4 to 16K, 64M (up to 3.3 times)"; nothing if ours is nowhere slower."""
    runs = [
        [short_bytes(size) for size, _ in run]
        for is_lost, run in groupby(sorted(shares.items()), lambda case: case[1] < LOST)
        if is_lost
    ]
    sizes = ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
    return f"{sizes} (up to {1 / min(shares.values()):.1f} times)" if runs else ""


def joined(documents: dict[str, Any]) -> dict[str, Any]:
    """The figures of several runs as one, in which each MPI has its own name; ours and the limit are the first's."""
    first = next(iter(documents.values()))
    records = [
        {**record, "contestant": name if record["contestant"] == "mpi" else record["contestant"]}
        for name, document in documents.items()
        for record in document["records"]
        if document is first or record["contestant"] == "mpi"
    ]
    return {**first, "records": records}


PREFACE = """# Beside its peers

Look up here, for every collective and size, which library is faster on one host, and by how much. The page begins with
the cases that we lose.

The figures are from one run of `python -m benchmarks.compare` on {when}: {machine}.
In each process, collectives and the peer take turns call by call, as `benchmarks/README.md` describes.

- Each table shows our median time in microseconds for mapped tensors: from `collectives.empty`, or earlier results.
- Every other column is a ratio: that library's time divided by ours in the same round (the median of all rounds).
  **Above 1, we are faster.**
- "ours, private" is our own time for ordinary NumPy arrays.
- Each call directly follows a call of another library, so the caches are cold. For small tensors, cold caches cost more
  than the call itself. "small all-reduces back to back" has their times in a loop; [How
  fast](speed.md#one-call-several-figures) compares the figures.
- If there are more ranks than cores, the ranks take turns on the cores.

{versions}
"""


def described(output: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """When, where and of which versions a run is."""
    documents = [json.loads(file.read_text()) for file in sorted(output.glob("*-*-*.json"))]
    machine = documents[0]["machine"]
    versions = dict.fromkeys(document["machine"]["mpi"] for document in documents if document["machine"]["mpi"])
    packages = {name: text for document in documents for name, text in document["machine"]["packages"].items()}
    return {
        "when": documents[0]["when"][:10],
        "mpi": [name for name, _ in chosen.mpi],
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}",
        "versions": f"{', '.join(versions)}; {', '.join(f'{name} {text}' for name, text in packages.items())}.",
    }


def named(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    return name, os.path.abspath(python)


def main() -> None:
    flags = argparse.ArgumentParser("benchmarks.compare", description="Ours beside its peers, in one run.")
    flags.add_argument("--mpi", type=named, action="append", metavar="NAME=PYTHON", help="an MPI's environment")
    flags.add_argument("--ranks", type=lambda text: [int(part) for part in text.split(",")], default=[2, 4])
    flags.add_argument("--collectives", type=lambda text: text.split(","), default=COLLECTIVES)
    flags.add_argument("--largest", default="256M", metavar="SIZE", help="leave larger sizes out")
    flags.add_argument("--calls", type=int, default=9, help="timed calls of a size")
    flags.add_argument("--cluster", metavar="TOOL", help="also between hosts that this makes; see benchmarks.cluster")
    flags.add_argument("--frameworks", action="store_true", help="also training steps, and JAX arrays")
    flags.add_argument("--gpu", action="store_true", help="also on a GPU")
    flags.add_argument("--output", type=Path, default=Path("compare-output"), metavar="DIR")
    flags.add_argument("--report", nargs=2, type=Path, metavar=("DIR", "PAGE"), help="write the page of a run again")
    chosen = flags.parse_args()
    if chosen.report:
        report(*chosen.report)
        return
    chosen.mpi = chosen.mpi or [
        ("Open MPI", str(ROOT / ".venv/bin/python")),
        ("MPICH", str(ROOT / ".venv-mpich/bin/python")),
    ]
    chosen.output.mkdir(parents=True, exist_ok=True)
    for part in parts(chosen):
        print(part.title, file=sys.stderr, flush=True)
        part.run(chosen.output)
    (chosen.output / "run.json").write_text(json.dumps(described(chosen.output, chosen)))
    report(chosen.output, chosen.output / "peers.md")


if __name__ == "__main__":
    main()
