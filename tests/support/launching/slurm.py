"""A real Slurm on hosts of `clusters`, from the system's packages ``slurm-wlm`` and ``munge``; its state is in each
host's own ``/tmp``.

    with slurm(2, tmp_path) as system:
        job = system.submit("examples/slurm/train.sbatch", "python", "train.py")
        assert "COMPLETED" in system.state_at_end(job)
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import ROOT, rank_environment

_PATIENCE = 60.0
_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost=host1
SlurmUser=root
AuthInfo=socket=/tmp/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/ended
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/tmp/slurmctld.log
SlurmdLogFile=/tmp/slurmd.log
SlurmdParameters=config_overrides
MpiDefault=none
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
NodeName=host[1-{number}] CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""
_DAEMONS = """
mkdir -m 755 /tmp/munge /tmp/slurmctld /tmp/slurmd
head -c 1024 "$1/key" >/tmp/munge/key && chmod 600 /tmp/munge/key
cd /tmp/munge && munged --force --key-file=key --socket=/tmp/munge/socket --pid-file=/tmp/munge/pid --log-file=log \
  --seed-file=seed && { [ "$(hostname)" != host1 ] || slurmctld; } && slurmd
"""


class Slurm:
    """A Slurm that is up.

    Attributes:
        hosts: its nodes, ``host1`` (where jobs are submitted), ``host2``, ...
        folder: all nodes see it.
    """

    def __init__(self, hosts: Cluster, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._environment = rank_environment(
            {
                "SLURM_CONF": str(folder / "slurm.conf"),
                "PATH": os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]),
                "PYTHONPATH": str(ROOT),
            }
        )

    def on(self, host: str, *command: str) -> str:
        """Run a command on a host, and return its output."""
        done = subprocess.run(
            self.hosts.on(host, *command),
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, script: str, *words: str) -> str:
        """Submit a job, and return its number."""
        return self.on("host1", "sbatch", "--parsable", f"--output={self.folder}/%j.out", script, *words).strip()

    def output(self, job: str) -> str:
        """Return what a job has printed so far."""
        path = self.folder / f"{job}.out"
        return path.read_text() if path.exists() else ""

    def wait_for(self, job: str, text: str) -> None:
        """Return when a job has printed a text."""
        end = time.monotonic() + _PATIENCE
        while text not in self.output(job):
            assert time.monotonic() < end, f"job {job} has not printed {text!r}:\n{self.output(job)}"
            time.sleep(0.02)  # a file does not notify its reader

    def state_at_end(self, job: str) -> str:
        """Wait for a job's end; return the line that Slurm writes about it."""
        end = time.monotonic() + _PATIENCE
        while True:
            ended = self.folder / "ended"
            lines = ended.read_text().splitlines() if ended.exists() else []
            line = next((line for line in lines if line.startswith(f"JobId={job} ")), None)
            if line is not None:
                return line
            assert time.monotonic() < end, f"job {job} has not ended:\n{self.output(job)}"
            time.sleep(0.02)


@contextmanager
def slurm(number: int, folder: Path) -> Iterator[Slurm]:
    """Start Slurm; skips the test where its packages are not installed, or no hosts can be made.

    Args:
        number: of hosts, each with two cores.
        folder: below ``/tmp``; all hosts see it.
    """
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing:
        pytest.skip(f"needs Slurm, and lacks {', '.join(missing)}: apt-get install slurm-wlm munge")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, number=number))
    (folder / "collectivesrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m collectives.launch "$@"\n')
    (folder / "collectivesrun").chmod(0o755)
    with cluster(number, shared=folder) as hosts:
        system = Slurm(hosts, folder)
        for host in range(number, 0, -1):
            system.on(f"host{host}", "sh", "-c", _DAEMONS, "sh", str(folder))
        yield system
