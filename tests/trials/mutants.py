"""Break schedules of the registry at random, and see whether the prover refuses what is wrong.

    python -m tests.trials.mutants [COUNT] [SEED]  # 1,000 mutants, seed 1; prints a table, and every one let through

A mutant has one or two changes: a step, or a send and its receive, dropped, doubled, on another chunk, to another rank,
from another rank, in another round, of another kind; rounds swapped or dropped; steps of a round in another order.
Which mutants are wrong is decided without the prover, by executing them on numbers, as messages between memories: wrong
is what does not meet, what reads what is not there, what ends with other numbers, in place or out of place, or with
other bits on other ranks. Those let through that are right are run by the engine, too, over every transport. Exit code
1 if the prover refuses less than 99 % of the wrong ones, or the engine computes anything wrong.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from collectives.schedules import registration, registry
from collectives.schedules.algorithm import Algorithm
from collectives.schedules.proof.verify import ScheduleError
from collectives.schedules.schedule import Schedule, Step, StepKind
from collectives.tools.drawing import with_schedules
from collectives.transport.threads import thread_groups
from collectives.worlds.world import World
from tests.support.scenarios import worlds

Rounds = list[list[list[Step]]]
"""Steps by rank and round."""
ARRIVES = (StepKind.RECEIVE, StepKind.REDUCE)


class Nothing(Exception):
    """There is nothing here that this change could apply to."""


def pairs(rounds: Rounds) -> list[tuple[int, int, Step, int, Step]]:
    """Every send with its receive: round, sender, send, receiver, receive."""
    met = []
    for number in range(len(rounds[0])):
        sends: dict[tuple[int, int], deque[Step]] = defaultdict(deque)
        for rank, own in enumerate(rounds):
            for step in own[number]:
                if step.kind is StepKind.SEND:
                    sends[rank, step.peer].append(step)
        for rank, own in enumerate(rounds):
            for step in own[number]:
                if step.kind in ARRIVES and sends[step.peer, rank]:
                    met.append((number, step.peer, sends[step.peer, rank].popleft(), rank, step))
    return met


def change_a_step(rounds: Rounds, chunks: int, draw: random.Random) -> None:
    """Drop, double or alter one step of one rank."""
    rank, number = draw.randrange(len(rounds)), draw.randrange(len(rounds[0]))
    steps = rounds[rank][number]
    if not steps:
        raise Nothing
    place = draw.randrange(len(steps))
    step = steps[place]
    steps[place : place + 1] = draw.choice(
        [
            [],
            [step, step],
            [replace(step, peer=draw.randrange(len(rounds)))],
            [replace(step, chunk=draw.randrange(chunks))],
            [replace(step, kind=draw.choice(list(StepKind)))],
            [replace(step, span=step.span + draw.choice((-1, 1)))],
            [replace(step, push=not step.push)],
        ]
    )


def change_a_pair(rounds: Rounds, chunks: int, draw: random.Random) -> None:
    """Drop, double or alter a send and its receive, so that they still meet."""
    met = pairs(rounds)
    if not met:
        raise Nothing
    number, sender, out, receiver, into = draw.choice(met)
    size, last = len(rounds), len(rounds[0]) - 1
    away, back = rounds[sender][number], rounds[receiver][number]
    at, to = away.index(out), back.index(into)
    what = draw.choice(("drop", "double", "chunk", "kind", "receiver", "sender", "round", "span", "push"))
    if what == "double":
        away.insert(at, out)
        back.insert(to, into)
        return
    if what in ("chunk", "span", "push"):
        values = {"chunk": draw.randrange(chunks), "span": out.span + draw.choice((-1, 1)), "push": not out.push}
        away[at], back[to] = replace(out, **{what: values[what]}), replace(into, **{what: values[what]})
        return
    if what == "kind":
        back[to] = replace(into, kind=ARRIVES[into.kind is StepKind.RECEIVE])
        return
    del away[at], back[to]
    if what == "receiver":
        peer = draw.choice([rank for rank in range(size) if rank != sender])
        away.insert(at, replace(out, peer=peer))
        rounds[peer][number].append(replace(into, peer=sender))
    elif what == "sender":
        peer = draw.choice([rank for rank in range(size) if rank != receiver])
        rounds[peer][number].append(replace(out, peer=receiver))
        back.insert(to, replace(into, peer=peer))
    elif what == "round":
        other = draw.randint(0, last)
        rounds[sender][other].append(out)
        rounds[receiver][other].append(into)


def change_rounds(rounds: Rounds, chunks: int, draw: random.Random) -> None:
    """Swap two rounds, of all ranks or of one; drop one; or order the steps of one anew."""
    one, other = draw.randrange(len(rounds[0])), draw.randrange(len(rounds[0]))
    what, alone = draw.choice(("swap", "swap of one", "drop", "shuffle")), draw.randrange(len(rounds))
    for rank, own in enumerate(rounds):
        if what == "swap" or (what == "swap of one" and rank == alone):
            own[one], own[other] = own[other], own[one]
        elif what == "drop" and len(own) > 1:
            del own[one]
        elif what == "shuffle" and rank == alone:
            draw.shuffle(own[one])


CHANGES: tuple[Callable[[Rounds, int, random.Random], None], ...] = (change_a_step, change_a_pair, change_rounds)


def mutant(algorithm: Algorithm, size: int, draw: random.Random) -> list[Schedule]:
    """The schedules of an algorithm, changed; of a broadcast from rank 0."""
    hosts = [range(size // 2), range(size // 2, size)] if algorithm.spans_hosts else [range(size)]
    of_rank = algorithm.schedules(hosts)
    right = [of_rank(rank) for rank in range(size)]
    while True:
        rounds = [[list(steps) for steps in schedule.rounds] for schedule in right]
        try:
            for _ in range(draw.choice((1, 1, 2))):
                draw.choice(CHANGES)(rounds, right[0].chunks, draw)
        except Nothing:
            continue
        changed = [replace(each, rounds=tuple(map(tuple, own))) for each, own in zip(right, rounds, strict=True)]
        if changed != right:
            return changed


def execute(schedules: Sequence[Schedule], start: Sequence[dict[int, float]], in_place: bool) -> list[dict[int, float]]:
    """Execute schedules as messages between memories, and return what lies in each rank's result.

    Raises:
        LookupError: a send and its receive do not meet, or something is read that is not there.
    """
    values = [dict(chunks) for chunks in start]
    results: list[dict[int, float]] = [dict(chunks) if in_place else {} for chunks in start]
    for number in range(max(len(schedule.rounds) for schedule in schedules)):
        before = [dict(chunks) for chunks in values]
        mail: dict[tuple[int, int], deque[tuple[Step, list[float]]]] = defaultdict(deque)
        for rank, schedule in enumerate(schedules):
            for step in schedule.rounds[number]:
                if step.kind is StepKind.SEND:
                    if step.span < 1 or step.peer == rank or not 0 <= step.peer < len(schedules):
                        raise LookupError(step)
                    sent = [before[rank][chunk] for chunk in range(step.chunk, step.chunk + step.span)]
                    mail[rank, step.peer].append((step, sent))
        for rank, schedule in enumerate(schedules):
            for step in schedule.rounds[number]:
                chunks = range(step.chunk, step.chunk + step.span)
                if step.kind is StepKind.COPY:
                    if step.peer != rank or step.push or not chunks:
                        raise LookupError(step)
                    for chunk in chunks:
                        results[rank][chunk] = start[rank][chunk] if not in_place else results[rank][chunk]
                    continue
                if step.kind is StepKind.SEND:
                    continue
                if step.peer == rank:
                    arrived = [before[rank][chunk] for chunk in chunks]
                else:
                    out, arrived = mail[step.peer, rank].popleft()
                    if (out.chunk, out.span, out.push) != (step.chunk, step.span, step.push):
                        raise LookupError(step)
                if step.push and (step.kind is StepKind.REDUCE or step.peer == rank):
                    raise LookupError(step)
                for chunk, value in zip(chunks, arrived, strict=True):
                    if step.kind is StepKind.REDUCE:
                        value = values[rank][chunk] + value
                    values[rank][chunk] = results[rank][chunk] = value
        if any(mail.values()):
            raise LookupError("a send without a receive")
    return results


def is_right(schedules: Sequence[Schedule]) -> bool:
    """Whether the schedules carry out their collective, by numbers: exact ones, and floats whose bits tell orders."""
    collective, size, chunks = schedules[0].collective, schedules[0].size, schedules[0].chunks
    if len({len(schedule.rounds) for schedule in schedules}) > 1:
        return False
    for trial, in_place in ((0, False), (0, True), (1, False), (2, True), (3, False)):
        draw = np.random.default_rng([trial, size, chunks])
        whole = (
            draw.integers(1, 1 << 52 - 6, (size, chunks)).astype(object)
            if not trial
            else draw.standard_normal((size, chunks)) * 10.0 ** draw.integers(-8, 8, (size, 1))
        )
        held = {
            "allgather": lambda rank: [rank],
            "alltoall": lambda rank: range(rank * size, rank * size + size),
            "broadcast": lambda rank: range(chunks) if rank == 0 else [],
        }.get(collective, lambda rank: range(chunks))
        start = [{chunk: whole[rank][chunk] for chunk in held(rank)} for rank in range(size)]
        try:
            results = execute(schedules, start, in_place and collective in ("allreduce", "broadcast"))
            for rank, result in enumerate(results):
                if collective in ("allreduce", "reducescatter"):
                    wanted = {
                        chunk: sum(whole[:, chunk]) for chunk in ([rank] if collective[0] == "r" else range(chunks))
                    }
                elif collective == "broadcast":
                    wanted = {chunk: whole[0][chunk] for chunk in range(chunks)}
                elif collective == "allgather":
                    wanted = {chunk: whole[chunk][chunk] for chunk in range(chunks)}
                else:
                    wanted = {peer * size + rank: whole[peer][peer * size + rank] for peer in range(size)}
                for chunk, value in wanted.items():
                    exact = not trial or collective not in ("allreduce", "reducescatter")
                    scale = sum(abs(whole[:, chunk]))
                    if result[chunk] != value if exact else abs(result[chunk] - value) > 1e-12 * scale:
                        return False
                    if collective == "allreduce" and result[chunk] != results[0][chunk]:
                        return False
        except LookupError:
            return False
    return True


def is_refused(schedules: Sequence[Schedule]) -> str:
    """Why registration refuses the schedules; empty if it does not."""
    try:
        registration._Examined().add(schedules, schedules[0].collective)
    except ScheduleError as error:
        return str(error)
    return ""


def run(schedules: Sequence[Schedule]) -> None:
    """Have the engine execute schedules over every transport; raises if a result is wrong."""
    collective, size = schedules[0].collective, schedules[0].size
    rounds = [schedule.rounds for schedule in schedules]
    before = dict(registry._ALL)
    scenario = {
        "allreduce": worlds.every_algorithm_and_size,
        "reducescatter": worlds.reducescatters,
        "allgather": worlds.allgathers,
        "broadcast": worlds.broadcasts,
        "alltoall": worlds.alltoalls,
    }[collective]
    offered, counts = worlds.algorithms, worlds.COUNTS
    try:
        worlds.algorithms, worlds.COUNTS = lambda of: ("mutant",) if of == collective else (), (7, 3001, 3001)
        registration.register(collective, "mutant", lambda rank, size: rounds[rank], [size])
        thread_groups.run(size, scenario, make_world=World)
    finally:
        worlds.algorithms, worlds.COUNTS = offered, counts
        registry._ALL.clear()
        registry._ALL.update(before)


def trial(count: int, seed: int, engine: bool = True) -> tuple[Counter[str], list[str]]:
    """Judge ``count`` mutants; returns how many of each kind, and a line for each wrong one that was not refused."""
    draw, kinds, missed = random.Random(seed), Counter[str](), list[str]()
    everything = with_schedules()
    for number in range(count):
        algorithm = everything[number % len(everything)]
        changed = mutant(algorithm, draw.randint(3, 6) if algorithm.spans_hosts else draw.randint(2, 6), draw)
        right, refused = is_right(changed), is_refused(changed)
        kinds[f"{'right' if right else 'wrong'}, {'refused' if refused else 'let through'}"] += 1
        if not right and not refused:
            missed.append(f"mutant {number}: {changed}")
        if right and refused:
            kinds[f"right, refused because {refused.rpartition(': ')[2]}"] += 1
        if right and not refused and engine:
            try:
                run(changed)
            except Exception:
                print(f"mutant {number}, which the engine could not run:", *changed, sep="\n")
                raise
            kinds["run by the engine"] += 1
    return kinds, missed


if __name__ == "__main__":
    kinds, missed = trial(*(int(word) for word in (*sys.argv[1:], *("1000", "1")[len(sys.argv) - 1 :])))
    for kind, times in sorted(kinds.items()):
        print(f"{times:6}  {kind}")
    print(*missed, sep="\n")
    wrong = kinds["wrong, refused"] + kinds["wrong, let through"]
    print(f"refused {kinds['wrong, refused']} of {wrong} wrong ones, {kinds['wrong, refused'] / wrong:.2%}")
    sys.exit(kinds["wrong, refused"] < 0.99 * wrong)
