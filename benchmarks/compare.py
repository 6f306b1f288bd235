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
from collections.abc import Iterator
from dataclasses import dataclass
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
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
            text = ended.stdout if ended.returncode == 0 else f"{ended.stdout}\n{failed(ended.stdout)}"
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
    lines = [PREFACE.format(**run)]
    lost: list[str] = []
    for collective in COLLECTIVES:
        for ranks in LARGEST:
            documents = {
                name: json.loads(file.read_text())
                for number, name in enumerate(run["mpi"])
                if (file := output / f"{collective}-{ranks}-{number}.json").exists()
            }
            if documents:
                lines += [f"### {collective}, {ranks} ranks\n", *table(documents, f"{collective}, {ranks} ranks", lost)]
                if ranks == 2:
                    picture = page.parent / "pictures" / f"peers-{collective}.svg"
                    picture.parent.mkdir(exist_ok=True)
                    plot(joined(documents), picture)
                    picture.with_suffix(".png").unlink()
                    lines.append(f"![Bus bandwidth of {collective} by size](pictures/{picture.name})\n")
    lines += ["## Between hosts, in frameworks, and what could not run\n"]
    for file in sorted(output.glob("*.txt")):
        title, command, *printed = file.read_text().splitlines()
        if not file.stem.startswith(COLLECTIVES):
            shown = "\n".join(printed).strip()
            lines.append(f"### {title.removeprefix('# ')}\n\n    {command}\n\n```text\n{shown}\n```\n")
        elif not file.with_suffix(".json").exists():
            lines.append(f"{title.removeprefix('# ')}: {printed[-1]}\n")
    lines += ["## Where we lose\n", *(lost or ["Nowhere in this run."]), ""]
    page.write_text("\n".join(lines))


def table(documents: dict[str, Any], title: str, lost: list[str]) -> list[str]:
    """Rows of sizes: our microseconds, and the time of each peer divided by ours in the same run. What is lost to a
    peer is a line added to ``lost``."""
    mode = "in-place" if title.startswith(IN_PLACE) else "out-of-place"
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
                lost += _losses(title, peer, "mapped", shares)
                lost += _losses(title, peer, "private", {size: shares[size] / private[size] for size in shares})
    rows = [f"| bytes | ours, mapped (µs) | {' | '.join(ratios)} |", "|---" * (2 + len(ratios)) + "|"]
    for size in sorted(ours):
        cells = [f"{column[size]:.2f}" if size in column else "" for column in ratios.values()]
        rows.append(f"| {short_bytes(size)} | {ours[size]:,.1f} | {' | '.join(cells)} |")
    return [*rows, ""]


def _ratio(record: dict[str, Any]) -> float:
    return float(record["ratio"]["median"])


def _losses(title: str, peer: str, memory: str, shares: dict[int, float]) -> list[str]:
    worse = {size: 1 / share for size, share in shares.items() if share < LOST}
    sizes = ", ".join(map(short_bytes, worse))
    return [f"- {title}, {memory}: {peer} at {sizes} (up to {max(worse.values()):.1f} times)"] if worse else []


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

One run of `python -m benchmarks.compare` on {when}: {machine}.
In each process ours and the peer take turns call by call, as `benchmarks/README.md` describes. A table has our median
in microseconds for tensors that the ranks map (`collectives.empty`, or results), and the median of the other's time
divided by ours in the same round: above 1 ours is faster. "ours, private" are NumPy arrays as they come. More ranks
than cores take turns on them.

{versions}

## On one host
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
