"""Runs jobs from their start to their end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.chaos.by_hand import ByHand
from benchmarks.chaos.deaths import Plan, early
from benchmarks.chaos.hosts import Hosts
from benchmarks.chaos.job import SMALLEST, Hang, Job, Outcome


def scale(sizes: Sequence[int]) -> Outcome:
    """Run a job of one number of ranks after the other, as its discovery file says."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        job = Job(Plan(0, 0, max(sizes), False, ()), Path(name), None)
        with job.running(smallest=1, places=f"localhost:{sizes[0]}\n"):
            try:
                for size in sizes:
                    job.place(f"localhost:{size}\n")
                    job.until(partial(job.settled, exactly=size), f"{size} ranks train")
                job.end()
                job.outcome.problems += [f"left behind: {left}" for left in job.leftovers(shared)]
            except Hang as hang:
                job.outcome.problems.append(str(hang))
                job.show_stacks()
    return job.outcome


def run(plan: Plan, hosts: Hosts | None = None) -> Outcome:
    """Run a job to its end."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=hosts.shared if hosts else None) as name:
        job = ByHand(plan, Path(name)) if plan.by_hand else Job(plan, Path(name), hosts)
        if plan.end == "start":
            job.arm(0, early(plan), 1)
        # Alone, a survivor retries as well: it never has to wait for newcomers, and to return to a commit with them.
        with job.running(smallest=1 if plan.retry else SMALLEST):
            try:
                for number, death in enumerate(plan.deaths):
                    job.strike(number, death)
                job.end()
                job.outcome.problems += [f"left behind: {left}" for left in job.leftovers(shared)]
                job.read_file()
            except Hang as hang:
                job.outcome.problems.append(str(hang))
                job.show_stacks()
    return job.outcome
