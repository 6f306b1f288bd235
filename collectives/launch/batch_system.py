"""Start processes on a job's other hosts by the batch system that has allotted these hosts.

    Slurm     srun --nodelist=HOST COMMAND, as a step that shares all that the job has on the host
    LSF       blaunch HOST COMMAND
    PBS       ssh HOST pbs_attach -j JOB COMMAND

As ssh does, srun and blaunch connect the command's standard streams, and end the command when they are ended. PBS's
pbsdsh and pbs_tmrsh do not: the command's stdin is empty, and its output goes into the job's files. Processes by ssh
alone are not the batch system's: it neither ends them with the job nor counts and limits what they use.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from collectives.base.launchers import VARIABLES
from collectives.launch import agent
from collectives.launch.hosts import allotted
from collectives.launch.ssh import Ssh

_JOBS = {"srun": "SLURM_JOB_ID", "blaunch": "LSB_JOBID"}
"""The variable that says that this process is in a job in which a command starts processes."""
_OF_STEPS = re.compile(
    r"(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|TMPDIR|SLURMD_NODENAME|"
    r"SLURM_(CPUS_ON_NODE|GPUS_ON_NODE|JOB_GPUS|STEP_.*|TOPOLOGY_ADDR)"
)
"""Variables that the batch system sets on each host to what the job has there."""
_NOT_OF_RANKS = ("SSH_CONNECTION", *(name for name in VARIABLES if name.startswith("SLURM_")))
"""Variables of the step itself, which is one process; and of the session that has submitted the job, on its host."""
_NOT_OF_STEPS = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE")
"""The job's requests for each task, which would keep a step of one task from the cores of the host's other tasks."""


@dataclass(frozen=True, slots=True)
class BatchSystem(Ssh):
    """By a batch system on the hosts that it has allotted, by ssh on others.

    Attributes:
        program: ``srun`` or ``blaunch``.
        slots: the ranks that each allotted host takes.
        gpus_per_task: as the job has requested, 0 if it has not.
    """

    program: str = ""
    slots: Mapping[str, int] = field(default_factory=dict)
    gpus_per_task: int = 0

    def starter(self, host: str) -> str:
        return self.program if host in self.slots else Ssh.starter(self, host)

    def command(self, host: str, words: Sequence[str]) -> list[str]:
        if host not in self.slots:
            return Ssh.command(self, host, words)
        words = ["env", *(f"-u{name}" for name in _NOT_OF_RANKS), *words]
        if self.program == "blaunch":
            return ["blaunch", "-no-shell", host, *words]
        gpus = [f"--gpus-per-node={self.gpus_per_task * self.slots[host]}"] if self.gpus_per_task else []
        return [
            *("env", *(f"-u{name}" for name in _NOT_OF_STEPS)),
            *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *gpus),
            *("--export=ALL", "--cpu-bind=none", "--mpi=none", "--quiet", *words),
        ]

    def address(self, host: str) -> str:
        return host if host in self.slots else Ssh.address(self, host)

    def travelling(self, host: str, environment: Mapping[str, str]) -> dict[str, str]:
        travels = Ssh.travelling(self, host, environment)
        if host not in self.slots:
            return travels
        return {name: text for name, text in travels.items() if not _OF_STEPS.fullmatch(name)}

    def advice(self, host: str, code: int) -> str:
        if host not in self.slots:
            return Ssh.advice(self, host, code)
        test = f"srun --overlap -N 1 -n 1 -w {host} true" if self.program == "srun" else f"blaunch {host} true"
        return (
            f"'{test}' must succeed in the job, and {sys.executable} and {agent.__file__} must exist there too; or "
            "pass --launcher ssh"
        )


def batch_system(environment: Mapping[str, str], ssh: Ssh) -> Ssh | None:
    """Return how the batch system in whose job this process is starts others; None without a job or its command."""
    slots = {host.name: host.slots for host in allotted(environment)}
    attach = shutil.which("pbs_attach")
    for program, variable in _JOBS.items():
        if slots and variable in environment and shutil.which(program):
            gpus = re.search(r"\d+$", environment.get("SLURM_GPUS_PER_TASK", ""))
            return BatchSystem(
                ssh.port, ssh.identity_file, ssh.timeout, (), program, slots, int(gpus[0]) if gpus else 0
            )
    if slots and attach and "PBS_JOBID" in environment:
        return replace(ssh, before=(attach, "-j", environment["PBS_JOBID"]))
    return None
