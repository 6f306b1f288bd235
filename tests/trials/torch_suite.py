"""Run torch's own tests of its backends over ours, and over gloo, and compare.

    python -m tests.trials.torch_suite                             # 2 ranks: every test, over both
    python -m tests.trials.torch_suite --ranks 3 --only all_reduce # those whose names contain a text
    python -m tests.trials.torch_suite --backend collectives       # one backend alone

The tests come with torch (``torch.testing._internal.distributed.distributed_test``). They choose what to run by the
backend's name, so ours runs what says "gloo". Ranks are forked, which spares each the import of torch. What gloo passes
and ours does not is listed, and makes the exit code 1, but for what `DIFFERENT` explains.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

_BY_NAME = "torch refuses monitored_barrier for every backend but gloo, by its name"
DIFFERENT = {
    "test_barrier_timeout_full_group": "raises the right error in other words",
    "test_ddp_logging_data_cpu": "asks for the environment variables of gloo",
    "test_monitored_barrier_gloo": _BY_NAME,
    "test_monitored_barrier_gloo_rank_0_timeout": _BY_NAME,
    "test_monitored_barrier_gloo_subgroup": _BY_NAME,
}
"""Tests that gloo passes and ours is not meant to, with the reason."""
_LINE = re.compile(r"^(passed|failed|skipped) (\w+)(?:: (.*))?$", re.MULTILINE)
_WITHIN = 1800


def run(backend: str, ranks: int, only: str) -> None:
    """In a process of its own: run the tests, and print a line for each."""
    os.environ |= {"BACKEND": backend, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
    import torch

    import collectives.c10d.groups  # before the ranks are forked

    collectives.c10d.register()
    name = "torch.testing._internal.distributed.distributed_test"
    path = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"
    suite: Any = types.ModuleType(name)
    sys.modules[name] = suite
    text = path.read_text()
    if backend != "gloo":
        from torch.testing._internal import common_distributed

        text = text.replace('"gloo"', f'"{backend}"').replace("Backend.GLOO", "Backend.COLLECTIVES")
        for feature in common_distributed.DistTestCases.backend_feature.values():
            feature |= {backend} if "gloo" in feature else set()
    suite.__file__ = str(path)
    exec(compile(text, str(path), "exec", dont_inherit=True), suite.__dict__)

    class Forked(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    suite.Forked = Forked
    Forked.__module__ = name
    Forked.__qualname__ = "Forked"

    class Result(unittest.TestResult):
        def note(self, how: str, test: Any, why: str = "") -> None:
            print(f"\n{how} {test._testMethodName}{why and ': '}{why}", flush=True)

        def addSuccess(self, test: Any) -> None:
            self.note("passed", test)

        def addSkip(self, test: Any, reason: str) -> None:
            self.note("skipped", test, reason.replace("\n", " "))

        def addFailure(self, test: Any, error: Any) -> None:
            self.note("failed", test, str(error[1])[-3000:].replace("\n", " | "))

        addError = addFailure

    names = [test for test in unittest.defaultTestLoader.getTestCaseNames(Forked) if only in test]
    unittest.TestSuite(Forked(test) for test in names).run(Result())


def outcomes(backend: str, ranks: int, only: str) -> dict[str, tuple[str, str]]:
    """How each test ended over a backend, and why."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        __spec__.name,
        "--run",
        backend,
        "--ranks",
        str(ranks),
        "--only",
        only,
    ]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_WITHIN)
    return {name: (how, why) for how, name, why in _LINE.findall(ended.stdout)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="torch_suite", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--backend", choices=("gloo", "collectives"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.ranks, options.only)
        return 0
    backends = [options.backend] if options.backend else ["gloo", "collectives"]
    results = {backend: outcomes(backend, options.ranks, options.only) for backend in backends}
    for backend, tests in results.items():
        counts = {how: sum(outcome == how for outcome, _ in tests.values()) for how in ("passed", "failed", "skipped")}
        print(f"{backend}, {options.ranks} ranks: " + ", ".join(f"{count} {how}" for how, count in counts.items()))
    ours, reference = results[backends[-1]], results[backends[0]]
    missing = [name for name, (how, _) in reference.items() if how == "passed" and ours.get(name, ("",))[0] != "passed"]
    if len(backends) == 1:
        missing = [name for name, (how, _) in ours.items() if how == "failed"]
    for name in missing:
        how, why = ours.get(name, ("no outcome", ""))
        print(f"  {name}: {DIFFERENT.get(name) or f'{how}: {why}'}")
    better = [name for name, (how, _) in ours.items() if how == "passed" and reference[name][0] != "passed"]
    if better:
        print(f"  passed by ours alone: {', '.join(better)}")
    return int(bool(set(missing) - set(DIFFERENT)))


if __name__ == "__main__":
    sys.exit(main())
