"""What a GPU check leaves behind: three files, however many parts there are, because some machines hand back only a
few.

gpu-check.json    what it ran on, every part, every figure
gpu-check.txt     the same as tables, for people
logs.tar.gz       the output of every part
"""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.runner import Outcome


def write(output: Path, logs: Path, versions: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write the three files anew. Called after each part, so that nothing is lost when the check is ended early."""
    output.mkdir(parents=True, exist_ok=True)
    content = {**versions, "parts": [each.as_dict() for each in outcomes]}
    (output / "gpu-check.json").write_text(json.dumps(content, indent=1) + "\n")
    (output / "gpu-check.txt").write_text(heading(versions) + "\n" + table(outcomes) + "\n")
    unfinished = logs / "logs.tar.gz"
    with tarfile.open(unfinished, "w:gz") as archive:
        for log in sorted(logs.glob("*.log")):
            archive.add(log, log.name)
    # By its own name only when it is whole.
    part = output / "logs.tar.gz.part"
    part.write_bytes(unfinished.read_bytes())
    os.replace(part, output / "logs.tar.gz")


def heading(versions: Mapping[str, Any]) -> str:
    """What it runs on, in one line."""
    return "# " + ", ".join(f"{name} {value}" for name, value in versions.items() if value)


def table(outcomes: Sequence[Outcome]) -> str:
    """Every part, then every figure beside its bar, then how many parts came to what."""
    lines = ["", f"{'part':<18}{'result':<12}{'s':>6}  detail"]
    lines += [f"{each.name:<18}{each.status:<12}{each.seconds:>6.1f}  {each.detail[:110]}" for each in outcomes]
    lines += ["", f"{'part':<18}{'figure':<72}{'value':>12} {'unit':<10}{'bar':<10}met"]
    for each in outcomes:
        for figure in each.result.get("figures", ()):
            met = (
                f"not judged: {figure['record']}"
                if figure["record"]
                else {True: "yes", False: "NO", None: "-"}[figure["met"]]
            )
            lines.append(
                f"{each.name:<18}{figure['what']:<72}{figure['value']:>12.2f} "
                f"{figure['unit']:<10}{figure['bar'] or '-':<10}{met}"
            )
    counted = Counter(each.status for each in outcomes)
    missed = sum(figure["met"] is False for each in outcomes for figure in each.result.get("figures", ()))
    said = [f"{number} {status}" for status, number in counted.items()] + [f"{missed} bars missed"]
    return "\n".join(
        [*lines, "", f"{len(outcomes)} parts in {sum(each.seconds for each in outcomes):.0f} s: {', '.join(said)}"]
    )
