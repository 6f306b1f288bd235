"""Let a rank die in the middle of a training over our backend of torch.distributed, and look at the others.

    python -m tests.trials.c10d_deaths                         # 60 deaths on this machine
    python -m tests.trials.c10d_deaths --count 9 --seed 7      # fewer, others
    python -m tests.trials.c10d_deaths --hosts --count 10      # whole hosts are switched off

Two or three processes that nobody supervises train by DDP, FSDP2 or tensor parallelism. At a pseudo-random moment one
of them is killed, raises an exception, or is stopped without a word. Each survivor has to raise the right error in
time, naming the rank, and to end by a traceback with exit code 1. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.transport import backoff
from tests.support.launching.clusters import cluster
from tests.support.launching.mpirun import ROOT, rank_environment
from tests.support.launching.ports import free_port

TRAININGS = ("DDP", "FSDP2", "tensor parallel")
HOWS = {"SIGKILL": signal.SIGKILL, "exception": signal.SIGUSR1, "SIGSTOP": signal.SIGSTOP}
OFF = "power-off"
_PEER_TIMEOUT = 2.0
_AT_ONCE, _SILENT = 5.0, 1.5 * _PEER_TIMEOUT + 5.0
"""Seconds from the event to the last survivor's error: after a closed connection, and after silence or an exception,
with which the interpreter ends first."""
_BUILD_WITHIN = 10.0
"""Seconds more, where the survivors have to build their models first."""
_START_WITHIN, _END_WITHIN = 120.0, 20.0
_LATEST = 1.0
"""Seconds after the ranks have met, or have trained for two steps, within which one dies."""
_WIDTH = 12
_MARK = "tests.trials.c10d_deaths"


@dataclass(frozen=True)
class Death:
    """One death to come. ``hosts``: the number of each rank's host; ``victim``: the rank, or one of the lost host's;
    ``delay``: seconds after all ranks have trained for ``steps``."""

    training: str
    how: str
    hosts: tuple[int, ...]
    victim: int
    steps: int
    delay: float

    @property
    def lost(self) -> list[int]:
        if self.how != OFF:
            return [self.victim]
        return [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.victim]]

    def __str__(self) -> str:
        when = f"{self.delay:.2f} s after step {self.steps}"
        where = f", hosts {self.hosts}" if self.how == OFF else ""
        return f"{self.training:15} {self.how:9} rank {self.victim} of {len(self.hosts)}, {when}{where}"


def draw(seed: int, trainings: Sequence[str], hows: Sequence[str]) -> Iterator[Death]:
    """Deaths without end: each training and each way to die in turn."""
    rng = random.Random(seed)
    while True:
        pairs = list(itertools.product(trainings, hows))
        rng.shuffle(pairs)
        for training, how in pairs:
            hosts = rng.choice([(0, 1), (0, 1, 2), (0, 0, 1), (0, 1, 1)] if how == OFF else [(0, 0), (0, 0, 0)])
            victim, steps = rng.randrange(len(hosts)), rng.choice((0, 2, 2))
            yield Death(training, how, hosts, victim, steps, rng.uniform(0, _LATEST))


def inject(death: Death) -> tuple[float, str, list[str]]:
    """Run a job in which a rank dies. Returns the seconds until the last survivor raised, what the survivors were
    doing, and what was wrong."""
    with tempfile.TemporaryDirectory(prefix="c10d-deaths-") as name, ExitStack() as stack:
        folder = Path(name)
        before = set(os.listdir("/dev/shm"))
        hosts = stack.enter_context(cluster(1 + max(death.hosts), shared=folder)) if death.how == OFF else None
        ranks: list[subprocess.Popen[bytes]] = []
        common = {
            "WORLD_SIZE": str(len(death.hosts)),
            "MASTER_ADDR": "host1" if hosts else "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "COLLECTIVES_PEER_TIMEOUT": f"{_PEER_TIMEOUT:g}",
            "COLLECTIVES_KEY": secrets.token_hex(32),
        }
        if death.how == "SIGSTOP":  # between ranks of one host, silence is no failure
            common["COLLECTIVES_LOCAL_SIZE"] = "1"
        for rank, host in enumerate(death.hosts):
            command = [
                sys.executable,
                "-m",
                _MARK,
                "--rank",
                name,
                "--training",
                death.training,
                "--steps",
                str(death.steps),
            ]
            output = stack.enter_context((folder / f"output-{rank}").open("wb"))
            process = subprocess.Popen(
                hosts.on(f"host{host + 1}", *command) if hosts else command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**rank_environment(common), **common, "RANK": str(rank)},
                cwd=ROOT,
            )
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            ranks.append(process)

        def strike() -> None:
            if hosts:
                hosts.power_off(f"host{death.hosts[death.victim] + 1}")
            else:
                ranks[death.victim].send_signal(HOWS[death.how])

        seconds, during, problems = _observe(death, folder, ranks, strike)
        if problems:
            for rank in range(len(ranks)):
                text = (folder / f"output-{rank}").read_text(errors="replace")
                problems.append(f"--- rank {rank}\n{text[-3000:]}")
    left = [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("collectives-")]
    return seconds, during, problems + ([f"{left} stay in /dev/shm"] if left else [])


def _observe(
    death: Death, folder: Path, ranks: Sequence[subprocess.Popen[bytes]], strike: Callable[[], None]
) -> tuple[float, str, list[str]]:
    def all_have(kind: str, of: Sequence[int], within: float) -> bool:
        def there() -> bool:
            return all((folder / f"{kind}-{rank}").exists() or ranks[rank].poll() is not None for rank in of)

        backoff.poll(there, within, 0.01)
        return all((folder / f"{kind}-{rank}").exists() for rank in of)

    if not all_have("ready", range(len(ranks)), _START_WITHIN):
        return float("nan"), "", ["the ranks have not begun"]
    time.sleep(death.delay)  # a random moment of the training, and nothing that is waited for
    begun = time.time()
    strike()
    survivors = [rank for rank in range(len(ranks)) if rank not in death.lost]
    bound = (_AT_ONCE if death.how == "SIGKILL" else _SILENT) + (0 if death.steps else _BUILD_WITHIN)
    problems, slowest, during = [], float("nan"), ""
    if all_have("outcome", survivors, bound + _END_WITHIN):
        outcomes = {rank: json.loads((folder / f"outcome-{rank}").read_text()) for rank in survivors}
        slowest = max(outcome["time"] for outcome in outcomes.values()) - begun
        during = ", ".join(outcome["during"] for outcome in outcomes.values())
        problems += [f"rank {rank} {text}" for rank in survivors for text in _judge(death, outcomes[rank])]
    if slowest > bound:
        problems.append(f"the last survivor raised after {slowest:.1f} s")
    ending = [*survivors, *([death.victim] if death.how == "exception" else [])]
    backoff.poll(lambda: all(ranks[rank].poll() is not None for rank in ending), _END_WITHIN, 0.01)
    for rank in ending:
        code = ranks[rank].poll()
        if code is None:
            problems.append(f"rank {rank} has not ended")
            ranks[rank].send_signal(signal.SIGABRT)  # the fault handler writes its stacks into the output
            ranks[rank].wait(10)
        elif code != 1:
            problems.append(f"rank {rank} has ended with {code}")
        else:
            text = (folder / f"output-{rank}").read_text(errors="replace")
            if "Traceback" not in text or (rank == death.victim and "the model exploded" not in text):
                problems.append(f"rank {rank} shows no traceback")
    return slowest, during, problems


def _judge(death: Death, told: dict[str, Any]) -> list[str]:
    """What is wrong with a survivor's error."""
    problems = []
    expected = ("RuntimeError", "RankFailedError") if told["during"] == "DDP's backward" else ("RankFailedError",)
    if told["error"] not in expected:
        problems.append(f"raised {told['error']} in {told['during']}")
    named = re.findall(r"rank \d+: (?:waits for )?rank (\d+)\b", told["text"])
    if not named or int(named[0]) not in death.lost:
        problems.append(f"names {named or 'nobody'}: {told['text']}")
    return problems


def _train(folder: Path, training: str, steps: int) -> None:
    """A rank's part: it trains until it is ended, and reports what has ended it. It is ready after ``steps``."""
    import torch
    import torch.distributed as dist

    import collectives.c10d

    def explode(*_: Any) -> None:
        raise ValueError("the model exploded")

    signal.signal(signal.SIGUSR1, explode)
    torch.set_num_threads(1)
    collectives.c10d.register()
    dist.init_process_group("collectives")
    rank, during = dist.get_rank(), "the beginning"
    try:
        if steps == 0:
            _write(folder / f"ready-{rank}", "")
        layers = [torch.nn.Linear(_WIDTH, 8 * _WIDTH), torch.nn.ReLU(), torch.nn.Linear(8 * _WIDTH, _WIDTH)]
        model: Any = torch.nn.Sequential(*layers)
        if training == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.004)
        elif training == "FSDP2":
            from torch.distributed.fsdp import fully_shard

            for layer in (0, 2):
                fully_shard(model[layer])
            fully_shard(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        for step in itertools.count():
            if step == steps > 0:
                _write(folder / f"ready-{rank}", "")
            during = "forward"
            loss = model(torch.ones(4, _WIDTH)).square().mean()
            during = f"{training}'s backward"
            loss.backward()
            during = "the step"
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except BaseException as error:
        told = {"error": type(error).__name__, "text": str(error), "time": time.time(), "during": during}
        _write(folder / f"outcome-{rank}", json.dumps(told))
        raise


def _write(path: Path, text: str) -> None:
    """Write a file that is never seen half."""
    part = path.with_name(f".{path.name}")
    part.write_text(text)
    part.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_MARK}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="number of deaths; %(default)s by default")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn; %(default)s by default")
    parser.add_argument("--training", action="append", choices=TRAININGS, help="only this one; may be repeated")
    parser.add_argument("--how", action="append", choices=HOWS, help="only so; may be repeated")
    parser.add_argument("--hosts", action="store_true", help="switch off hosts (tests.support.launching.clusters)")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        _train(asked.rank, asked.training[0], asked.steps)
    cases: defaultdict[str, list[tuple[float, bool]]] = defaultdict(list)
    deaths = draw(asked.seed, asked.training or TRAININGS, [OFF] if asked.hosts else asked.how or [*HOWS])
    for death in itertools.islice(deaths, asked.count):
        seconds, during, problems = inject(death)
        cases[f"{death.training}, {death.how}"].append((seconds, not problems))
        verdict = "WRONG" if problems else "ok"
        print(f"{death}: {seconds:5.2f} s, in {during}: {verdict}", *problems, sep="\n", flush=True)
    print(f"\n{'case':26} deaths right  slowest")
    for case, outcomes in sorted(cases.items()):
        slowest = max(seconds for seconds, _ in outcomes)
        print(f"{case:26} {len(outcomes):6} {sum(right for _, right in outcomes):5} {slowest:6.2f} s")
    wrong = sum(not right for outcomes in cases.values() for _, right in outcomes)
    print(f"{asked.count} deaths, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
