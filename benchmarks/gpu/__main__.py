"""``python -m benchmarks.gpu``: every GPU check, within a budget; a table at the end, and everything as JSON.

``--device cpu`` rehearses it where there is no GPU: the same parts in the same order, those that can on emulated GPUs
or on the CPU; what cannot run is named, with the reason.

Exit status: 0 if all is well; 1 if something failed, missed its bar, took too long, or was not reached; 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts as all_parts
from benchmarks.gpu import report
from benchmarks.gpu.runner import Outcome, Part, run_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen parts and report."""
    flags = argparse.ArgumentParser(
        prog="benchmarks.gpu", description="Every check that needs a GPU.", allow_abbrev=False
    )
    folder = os.environ.get("OUT") or "gpu-output"
    flags.add_argument(
        "--output",
        type=Path,
        default=Path(folder),
        metavar="DIR",
        help=f"for what it leaves behind (default: {folder})",
    )
    flags.add_argument(
        "--budget", type=float, default=330.0, metavar="SECONDS", help="for everything together (default: 330)"
    )
    flags.add_argument(
        "--only", default="", metavar="LIST", help="parts and groups of parts by their names, comma-separated"
    )
    flags.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: rehearse without a GPU")
    flags.add_argument("--list", action="store_true", help="name the parts and end")
    options = flags.parse_args(arguments)
    begun = time.monotonic()
    chosen = _choose(flags, [word.strip() for word in options.only.split(",") if word.strip()])
    if options.device == "cpu":
        chosen = [part.rehearsed() for part in chosen]
    if options.list:
        print(
            "\n".join(
                f"{part.name:<16}{part.timeout:>4.0f} s  {part.why_not() or ' '.join(part.command)}" for part in chosen
            )
        )
        print("\n".join(f"{name:<16}        = {', '.join(names)}" for name, names in all_parts.GROUPS.items()))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as logs:
        first = run_all([all_parts.VERSIONS], options.budget, Path(logs), lambda outcome: None)[0]
        versions = first.result or {"problem": f"{first.name}: {first.status}: {first.detail}"}
        if versions.get("problem") and options.device == "cuda" and any(part.gpu for part in chosen):
            print(f"benchmarks.gpu: error: {versions['problem']}", file=sys.stderr)
            return 2
        rest = [part for part in chosen if part is not all_parts.VERSIONS]
        return check(rest, options.budget - (time.monotonic() - begun), options.output, Path(logs), versions, [first])


def check(
    chosen: Sequence[Part],
    budget: float,
    output: Path,
    logs: Path,
    versions: Mapping[str, Any],
    before: Sequence[Outcome] = (),
) -> int:
    """Run the parts and report; ``before`` has run already, and ``logs`` holds the parts' own files meanwhile."""
    outcomes = list(before)
    versions = {name: value for name, value in versions.items() if name != "figures"}

    def told(outcome: Outcome) -> None:
        outcomes.append(outcome)
        print(f"# {outcome.name:<16}{outcome.status:<10}{outcome.seconds:>6.1f} s  {outcome.detail[:150]}", flush=True)
        report.write(output, logs, versions, outcomes)

    print(report.heading(versions), flush=True)
    report.write(output, logs, versions, outcomes)
    run_all(chosen, budget, logs, told)
    print(report.table(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _choose(flags: argparse.ArgumentParser, words: Sequence[str]) -> list[Part]:
    """The parts that are named, in the check's order; all of them if none is."""
    every = all_parts.parts()
    try:
        names = all_parts.named(words)
    except KeyError as error:
        word, candidates = error.args[0], [*(part.name for part in every), *all_parts.GROUPS]
        near = difflib.get_close_matches(word, candidates, 1)
        flags.error(
            f"argument --only: no part is called {word!r}{f'; did you mean {near[0]!r}?' if near else ''} --list "
            f"names all"
        )
    return [part for part in every if not words or part.name in names]


if __name__ == "__main__":
    sys.exit(main())
