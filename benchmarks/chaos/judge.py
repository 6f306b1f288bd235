"""What is wrong with what a job has recorded, and how long everything took."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from benchmarks.chaos.deaths import HOST_ENDS, STOPS
from benchmarks.chaos.job import Outcome, Record, Strike
from benchmarks.chaos.training import after, zeros

LAUNCHER_WITHIN = 10.0
"""Seconds in which ranks end without their launcher."""

Life = list[tuple[int, list[Record]]]
"""A member's generations, each with the records that begin with "starts"."""


@dataclass(frozen=True)
class Times:
    """Seconds that one death has cost; None: not measured.

    Attributes:
        detect: from the death to the first survivor's error. ``end``: to the last one's.
        form: from there until the survivors are ranks of the next generation. ``first_step``: from there to the first
            step that all have done.
        total: the sum, of ``end`` and what follows.
    """

    row: str
    column: str
    detect: float | None = None
    end: float | None = None
    form: float | None = None
    first_step: float | None = None
    total: float | None = None
    shrinks: bool = True
    """Whether the survivors have gone on alone, without waiting for newcomers."""


@dataclass(frozen=True)
class Admission:
    """Seconds that newcomers have cost the others.

    Attributes:
        transfer: the longest synchronization of a rank. ``pause``: from the last commit of the old ranks to the first
            step of all.
    """

    transfer: float
    pause: float


def problems(outcome: Outcome) -> list[str]:
    """What is wrong."""
    wrong = [*outcome.problems]
    if outcome.code is not None:
        wrong += _code(outcome)
    wrong += _retried(outcome) if outcome.plan.retry else _generations(outcome)
    wrong += [text for strike in outcome.strikes for text in _named(outcome, strike)]
    wrong += _file(outcome)
    for member, records in outcome.records.items():
        for record in records:
            if record["what"] == "wrong":
                wrong.append(
                    f"member {member}: step {record['step']}: {record['part']}: expected {record['expected']} times "
                    f"the pattern, got {record['got']}"
                )
            if record.get("uneven"):
                wrong.append(f"member {member}: {record['what']}: not a multiple of the pattern: {record['uneven']}")
    return wrong


def _code(outcome: Outcome) -> list[str]:
    end, code = outcome.plan.end, outcome.code
    if end == "launcher killed":
        late = outcome.seconds > LAUNCHER_WITHIN
        return [f"the last rank ended {outcome.seconds:.1f} s after its launcher"] if late else []
    if end == "all die":
        wrong = [] if code else ["exit code 0, although all ranks have died"]
        named = "" if outcome.plan.by_hand else "was killed by signal 9"  # nobody is left who could say it
        return wrong + ([] if named in outcome.output else [f"the output does not say: {named!r}"])
    return [f"exit code {code}"] if code else []


def _file(outcome: Outcome) -> list[str]:
    """Check that the state's file has a commit, and the last one where the job was done."""
    file, records = outcome.file, [record for records in outcome.records.values() for record in records]
    if file is None:
        return []
    kind = "saved" if outcome.code else "done"
    possible = {(record["step"], *record["numbers"]) for record in records if record["what"] == kind}
    found = (file["step"], *file["numbers"])
    wrong = [f"the state's file is not a multiple of the pattern: {file['uneven']}"] if file["uneven"] else []
    if found not in possible:
        wrong.append(f"the state's file has {found}; last {kind}: {max(possible, default=None)}")
    return wrong


def _generations(outcome: Outcome) -> list[str]:
    """Check what every generation begins with and commits against a run without failures."""
    wrong, lives = [], {member: _life(records) for member, records in outcome.records.items()}
    framework = outcome.plan.framework
    at: dict[int, list[int]] = {0: zeros(framework)}
    """The numbers of all parts at each step of the run that survives."""
    held: dict[int, int] = {}
    """The step of what each member has saved or received last."""
    for event in outcome.events:
        if event["event"] != "generation":
            continue
        generation, members = event["generation"], event["members"]
        begun = {
            member: records for member in members for number, records in lives.get(member, []) if number == generation
        }
        for member, records in begun.items():
            start = records[0]
            if start["members"] != members or members[start["rank"]] != member:
                wrong.append(f"member {member}: generation {generation} is {start['members']}, rank {start['rank']}")
        starts = {(records[0]["step"], tuple(records[0]["numbers"])) for records in begun.values()}
        if len(starts) > 1:
            wrong.append(f"generation {generation} begins with different states: {sorted(starts)}")
        if not starts:
            continue
        step, numbers = min(starts)
        newest = max((held[member] for member in members if member in held), default=0)
        if step != newest:
            wrong.append(f"generation {generation} begins with step {step}; a member has committed step {newest}")
        if at.get(step) != [*numbers]:
            wrong.append(f"generation {generation}, step {step}: {[*numbers]}, but {at.get(step)} was committed")
        at = {step: [*numbers]}
        held |= dict.fromkeys(begun, step)
        for member, records in begun.items():
            for record in records:
                if record["what"] != "saved":
                    continue
                while max(at) < record["step"]:
                    at[max(at) + 1] = after(at[max(at)], members, max(at), framework)
                if record["numbers"] != at[record["step"]]:
                    wrong.append(
                        f"generation {generation}, member {member}, step {record['step']}: committed "
                        f"{record['numbers']}, a run without failures has {at[record['step']]}"
                    )
                held[member] = record["step"]
    if outcome.code == 0:
        ends = {(record["step"], *record["numbers"]) for member in outcome.records for record in _done(outcome, member)}
        if len(ends) != 1:
            wrong.append(f"the last states of the ranks: {sorted(ends)}")
    return wrong


def _retried(outcome: Outcome) -> list[str]:
    """Check each step that ranks have retried, or not: that no rank has lost one, and what it has made of the state."""
    framework = outcome.plan.framework
    wrong, at = [], {0: zeros(framework)}
    steps = [
        (record["step"], member, record)
        for member, records in outcome.records.items()
        for record in records
        if record["what"] == "step"
    ]
    for step, member, record in sorted(steps, key=lambda one: one[0]):
        at.setdefault(step, after(at[step - 1], record["by"], step - 1, framework) if step - 1 in at else [])
        if record["numbers"] != at[step]:
            wrong.append(f"member {member}, step {step}: {record['numbers']}, but another rank has {at[step]}")
    for member, records in outcome.records.items():
        own = [record["step"] for record in records if record["what"] == "step"]
        lost = [step for before, step in pairwise(own) if step != before + 1]
        if lost:
            wrong.append(f"member {member} has repeated or left out steps before {lost}")
    return wrong


def _done(outcome: Outcome, member: int) -> list[Record]:
    return [record for record in outcome.records[member] if record["what"] == "done"]


def _life(records: Sequence[Record]) -> Life:
    life: Life = []
    for record in records:
        if record["what"] == "starts":
            life.append((record["generation"], []))
        if life:
            life[-1][1].append(record)
    return life


def _named(outcome: Outcome, strike: Strike) -> list[str]:
    """Check that the survivors' errors name who has died."""
    if not strike.generation or strike.death.row in ("stop", "launcher killed"):
        return []
    members = _members(outcome, strike.generation)
    if strike.victim not in members:
        return []
    lost = {strike.victim}
    if strike.death.row in HOST_ENDS:
        hosts = _hosts(outcome, strike.generation)
        lost = {member for member in members if hosts[member] == hosts[strike.victim]}
    for member in members:  # who has died first may still be what others learn of
        dies = [record for record in outcome.records.get(member, []) if record["what"] == "dies"]
        lost |= {member for record in dies if record["generation"] == strike.generation}
    words = "hosts updated"
    if strike.death.row in STOPS:  # who is waited for in vain may wait as well
        words += "|CollectiveTimeoutError"
    victim = "|".join(rf"\brank {members.index(member)}\b|\bmember {member}\b" for member in lost)
    return [
        f"{strike.death} of member {strike.victim}, rank {members.index(strike.victim)} of generation "
        f"{strike.generation}: member {member} says {record['text']!r}"
        for member, record in _ends(outcome, strike)
        if not re.search(victim, record["text"].partition(": ")[2]) and not re.search(words, record["text"])
    ]


def _members(outcome: Outcome, generation: int) -> list[int]:
    return [*_hosts(outcome, generation)]


def _hosts(outcome: Outcome, generation: int) -> dict[int, str]:
    """The hosts of a generation's members, in the order of their ranks."""
    for event in outcome.events:
        if event["event"] == "generation" and event["generation"] == generation:
            return dict(zip(event["members"], event["hosts"], strict=True))
    return {}


def _ends(outcome: Outcome, strike: Strike) -> list[tuple[int, Record]]:
    """The survivors' records of the end of the generation in which somebody has died."""
    ends = []
    for member, records in outcome.records.items():
        later = [record for record in records if record["time"] >= strike.time]
        raised = [each for each in later if each["what"] == "raised" and each["generation"] == strike.generation]
        # What ends a training function whose steps were retried has the number of its first generation.
        ends += [(member, record) for record in raised[:1] if member != strike.victim]
    return ends


def times(outcome: Outcome) -> list[Times]:
    """What each death has cost."""
    measured = []
    for strike in outcome.strikes:
        row, column = strike.death.row, strike.death.column
        if outcome.plan.end == row and row not in HOST_ENDS:
            measured.append(Times(row, "job", end=outcome.seconds))
            continue
        ends = [] if row == "stop" else [(member, record["time"]) for member, record in _ends(outcome, strike)]
        forming = column == "forming" and not ends and row != "stop"
        if forming:  # they have ended the generation before; the next one is formed again, or soon after
            others = [member for member in _members(outcome, strike.generation) if member != strike.victim]
            ends = [(member, strike.time) for member in others if _next(outcome, member, "renewed", strike.time)]
        if not ends:
            measured.append(Times(row, column))
            continue
        moments = [time for _, time in ends]
        first, last = min(moments), max(moments)
        renewed = {member: _next(outcome, member, "renewed", last) for member, _ in ends}
        there = _latest([*renewed.values()])
        done = _latest([_next(outcome, member, "first step", since) for member, since in renewed.items() if since])
        times = Times(
            row,
            column,
            form=there and there - last,
            first_step=there and done and done - there,
            total=done and done - strike.time,
            shrinks=_shrinks(outcome, there),
        )
        measured.append(times if forming else replace(times, detect=first - strike.time, end=last - strike.time))
    return measured


def _shrinks(outcome: Outcome, moment: float | None) -> bool:
    """Whether the generation that ranks have come to at a moment has no newcomers."""
    formed = [event for event in outcome.events if event["event"] == "generation" and event["time"] <= (moment or 0.0)]
    return bool(formed) and formed[-1]["generation"] not in formed[-1]["born"]


def _next(outcome: Outcome, member: int, what: str, since: float) -> float | None:
    return next(
        (record["time"] for record in outcome.records[member] if record["what"] == what and record["time"] >= since),
        None,
    )


def _latest(moments: Sequence[float | None]) -> float | None:
    present = [moment for moment in moments if moment is not None]
    return max(present) if present else None


def admissions(outcome: Outcome) -> list[Admission]:
    """What each generation has cost that newcomers were admitted to, without a failure."""
    costs = []
    for event in outcome.events:
        if event["event"] != "generation" or event["generation"] == 1 or "hosts updated" not in event["why"]:
            continue
        parts: dict[str, list[Any]] = {"synced": [], "first step": [], "ended": []}
        for member in event["members"]:
            records = outcome.records.get(member, [])
            for number, record in enumerate(records):
                if record["what"] == "first step" and record["generation"] == event["generation"]:
                    before = [other for other in records[:number] if other["what"] in ("synced", "ended")]
                    parts["first step"].append(record["time"])
                    parts["synced"] += [other["seconds"] for other in before[-1:]]
                    parts["ended"] += [other["time"] for other in before[-2:-1] if other["what"] == "ended"]
        if parts["synced"] and parts["ended"]:
            costs.append(Admission(max(parts["synced"]), max(parts["first step"]) - min(parts["ended"])))
    return costs
