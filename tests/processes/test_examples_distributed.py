"""The examples of torch.distributed, on two ranks: they learn, resume, and over our backend come to the parameters to
which they come over gloo, bit by bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.processes.test_examples import AGREED, EXAMPLES, by_our_launcher, needs, numbers
from tests.support.launching.mpirun import python_for, run_command
from tests.support.launching.ports import free_port

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

DRIVER = """
import os, runpy, sys
import torch
import collectives.c10d
collectives.c10d.register()  # as torch does by the entry point, which an older installation lacks
ports = iter({ports!r})
for command in {commands!r}:
    name, *flags = command.split()
    if os.environ["RANK"] == "0":
        print("###", command, flush=True)
    trained = {{}}
    for backend in {backends!r}:
        # Rank 0's store ends with its group: a rank that is ahead must not meet the others at the last one.
        os.environ["MASTER_PORT"] = str(next(ports))
        sys.argv = [name, "--no-cuda", "--backend", backend, *flags]
        trained[backend] = runpy.run_path(name)["main"]()
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState
            AcceleratorState._reset_state(reset_partial_state=True)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # over gloo a rank that still waits for one that has left waits for ever
            torch.distributed.destroy_process_group()
    if len(trained) == 2:
        ours, expected = (trained[backend].state_dict() for backend in ("collectives", "gloo"))
        assert ours and all(torch.equal(ours[name], expected[name]) for name in expected)
        print("Alike", flush=True)
"""


def outputs(commands: list[str], folder: Path, *backends: str) -> list[str]:
    """Run examples with their flags, one after the other on the same two ranks; returns what each printed. Over two
    backends, the parameters are compared."""
    program = folder / "program.py"
    commands = [str(EXAMPLES / "pytorch" / command) for command in commands]
    ports = [free_port() for _ in range(len(commands) * len(backends))]
    program.write_text(DRIVER.format(commands=commands, backends=backends, ports=ports))
    result = run_command([*by_our_launcher(), str(python_for("openmpi")), str(program)], timeout=200)
    printed = re.split(r"^### .*\n", result.output, flags=re.MULTILINE)[1:]
    assert len(printed) == len(commands) and all(AGREED in text for text in printed), str(result)
    return printed


@pytest.mark.timeout(240)
def test_what_torch_itself_has(tmp_path: Path) -> None:
    commands = [
        f"pytorch_ddp.py --steps 60 --checkpoint {tmp_path}/whole",
        f"pytorch_ddp.py --steps 30 --checkpoint {tmp_path}/half",
        f"pytorch_ddp.py --steps 60 --checkpoint {tmp_path}/half",
        "pytorch_ddp.py --steps 30 --hook fp16 --zero --uneven",
        "pytorch_ddp.py --steps 30 --hook powersgd --batches-per-allreduce 2",
        f"pytorch_fsdp.py --steps 20 --checkpoint {tmp_path}/fsdp",
        f"pytorch_fsdp.py --steps 22 --checkpoint {tmp_path}/fsdp --use-mixed-precision",
        "pytorch_parallel.py --steps 100",
        "pytorch_parallel.py --steps 100 --pipeline",
    ]
    printed = outputs(commands, tmp_path, "collectives")
    assert "Resuming after step 30" in printed[2] and "Resuming after step 20" in printed[6]
    whole, resumed = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "half"))
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert all(numbers(r"Accuracy: ([\d.]+)%", text)[-1] > 60 for text in printed[:5])
    for text in (printed[5], *printed[7:]):
        losses = numbers(r"Loss: ([\d.]+)", text)
        assert losses[-1] < losses[0] / 3, text


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("framework", "flags"),
    [("lightning", "--epochs 2"), ("accelerate", "--epochs 2 --use-mixed-precision"), ("transformers", "--steps 20")],
)
def test_frameworks_come_to_the_parameters_of_gloo(framework: str, flags: str, tmp_path: Path) -> None:
    needs(framework)
    name = {"transformers": "trainer"}.get(framework, framework)
    (printed,) = outputs([f"pytorch_{name}.py {flags}"], tmp_path, "gloo", "collectives")
    assert printed.count(AGREED) == 2 and "Alike" in printed


@pytest.mark.timeout(120)
def test_torchft_goes_on_without_a_replica(tmp_path: Path) -> None:
    needs("torchft")
    command = [str(python_for("openmpi")), str(EXAMPLES / "pytorch/pytorch_torchft.py"), "--steps", "40"]
    result = run_command(command, timeout=100)
    assert "Step: 30\tReplicas: 2" in result.output and "All replicas hold the same parameters" in result.output
