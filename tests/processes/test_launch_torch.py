"""Programs that look for torch's variables find the world that ``collectivesrun`` has started, by MPI and without."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching.clusters import Cluster, cluster
from tests.support.launching.mpirun import python_for, run_command

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

BOTH_WORLDS = """
import os, socket
import torch.distributed
import collectives as hvd

torch.distributed.init_process_group("gloo")
hvd.init()
total = torch.tensor([torch.distributed.get_rank() + 1.0])
torch.distributed.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
ours = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
assert tuple(int(os.environ[name]) for name in names) == ours, (ours, dict(os.environ))
network = hvd.world().network
hvd.shutdown()
hvd.init()  # with torch's variables, and torch's process group beside it
sums = float(hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum)), float(total)
print(f"rank {hvd.rank()} of {hvd.size()} by {network}: {sums}", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize(("launcher", "network"), [("mpi", "mpi"), ("ssh", "tcp")])
def test_torchs_world_is_there_beside_ours(launcher: str, network: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(BOTH_WORLDS)
    python = str(python_for("openmpi"))
    words = ["-m", "collectives", "-np", "2", "--launcher", launcher, python, str(script)]
    shown = run_command([python, *words], timeout=60).output
    for rank in range(2):
        assert f"[{rank}] rank {rank} of 2 by {network}: (3.0, 3.0)\n" in shown, shown


@pytest.mark.skipif(find_spec("transformers") is None or find_spec("accelerate") is None, reason="needs transformers")
def test_accelerate_and_transformers_see_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "from accelerate import Accelerator\nfrom transformers import TrainingArguments\n"
        "print(Accelerator().num_processes, TrainingArguments(output_dir='never-made', report_to=[]).world_size)"
    )
    python = str(python_for("openmpi"))
    words = ["-m", "collectives", "-np", "2", python, str(script)]
    shown = run_command([python, *words], timeout=90, env={"ACCELERATE_USE_CPU": "1"}).output
    assert "[0] 2 2\n" in shown and "[1] 2 2\n" in shown, shown


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    """Two hosts that share nothing below ``/tmp``."""
    with cluster(2) as made:
        yield made


@pytest.mark.parametrize("launcher", ["mpi", "ssh"], ids="by {}".format)
def test_ranks_of_several_hosts_meet_on_that_of_rank_0(launcher: str, hosts: Cluster) -> None:
    python = python_for("openmpi")
    environment = {"PATH": f"{python.parent}:/usr/sbin:/usr/bin:/sbin:/bin", "GLOO_SOCKET_IFNAME": "eth0"}
    program = """
import os, torch.distributed
torch.distributed.init_process_group("gloo")
print(os.environ["RANK"], os.uname().nodename)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
    words = ["--launcher", launcher, "-H", "host2:1,host1:1", str(python), "-c", program]
    command = hosts.on("host1", str(python), "-m", "collectives", *words)
    shown = run_command(command, timeout=60, env=environment).output
    assert "[0] 0 host2\n" in shown and "[1] 1 host1\n" in shown, shown
