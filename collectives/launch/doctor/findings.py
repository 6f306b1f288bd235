"""One line of the doctor's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FINE, SLOW, WRONG = "fine", "slow", "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    Attributes:
        check: its name, such as ``/dev/shm``.
        state: FINE; SLOW: everything works, at a cost; WRONG: something does not work.
        found: what there is.
        cost, cure: what that costs, and what to do; empty if fine.
        host: where; empty until the launcher knows it.
    """

    check: str
    state: str
    found: str
    cost: str = ""
    cure: str = ""
    host: str = ""


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings as a text, host by host."""
    lines = []
    for host in dict.fromkeys(finding.host for finding in findings):
        lines.append(host)
        for finding in (one for one in findings if one.host == host):
            lines.append(f"  {finding.state:5}  {finding.check:18} {finding.found}")
            if finding.cost:
                lines += [f"{'':9}costs: {finding.cost}", f"{'':9}to do: {finding.cure}"]
        lines.append("")
    counts = [f"{sum(one.state == state for one in findings)} {state}" for state in (WRONG, SLOW, FINE)]
    return "\n".join([*lines, ", ".join(counts)])
