"""Manifests for Kubernetes: what is in them, that each names what the other needs, and which mistakes are named."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from collectives.base.errors import InvalidArgumentError
from collectives.launch import cli
from collectives.launch.node import Node, meeting
from tests.support.launching.pods import Pod, pods_of

KINDS = ("indexed-job", "jobset", "pytorchjob", "mpijob", "elastic")
NUMBERED = tuple(kind for kind in KINDS if kind != "mpijob")
"""Kinds whose pods start their own ranks."""


def written(words: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert cli.main(["--kubernetes=-", *shlex.split(words)]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize("kind", NUMBERED)
def test_pods_find_pod_0_by_name_and_have_their_ranks(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--kubernetes-kind {kind} --image registry/train:1 --job-name run-7 -np 5 --slots-per-host 2"
    pods = pods_of(written(f"{command} --no-tag python train.py --rate '$(HOME) $x'", capsys), key="ab" * 16)
    for number, pod in enumerate(pods):
        assert pod.command[:3] == ["collectivesrun", f"--node={number}/3", "-np=5"]
        assert pod.command[3:] == ["--no-tag", "python", "train.py", "--rate", "$(HOME) $x"]
        assert pod.variables["COLLECTIVES_RENDEZVOUS"] == f"tcp://{pods[0].name}:29400"
        assert pod.variables["COLLECTIVES_KEY"] == "ab" * 16
        assert pod.variables.get("COLLECTIVES_ELASTIC") == ("1" if kind == "elastic" else None)
    assert [Node(number, 3).ranks(5) for number in range(4)] == [(0, 1), (2, 3), (4,), (6, 7)]


@pytest.mark.parametrize("kind", KINDS)
def test_gpus_and_shared_memory(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"--kubernetes-kind {kind} --image i --namespace team -np 8 --gpus-per-pod 4 python train.py"
    manifests = written(command, capsys)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {"team"}
    for spec in specs(manifests):
        (container,) = spec["containers"]
        if container["name"] == "launcher":
            assert "resources" not in container and "volumes" not in spec
            continue
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 4}}
        assert container["volumeMounts"] == [{"name": spec["volumes"][0]["name"], "mountPath": "/dev/shm"}]
        assert spec["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}


def specs(node: Any) -> list[dict[str, Any]]:
    """The specifications of all pods in a manifest."""
    if isinstance(node, list):
        return [spec for entry in node for spec in specs(entry)]
    if not isinstance(node, dict):
        return []
    return [node] if "containers" in node else specs(list(node.values()))


def test_a_job_ends_with_its_first_failure_and_an_elastic_one_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    service, job = written("--image i -np 2 python train.py", capsys)
    assert service["spec"]["publishNotReadyAddresses"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    command = "--kubernetes-kind elastic --image i -np 2 --min-np 1 --max-np 4 python train.py"
    job = written(command, capsys)[1]
    assert job["spec"]["backoffLimit"] > 0 and job["spec"]["template"]["spec"]["restartPolicy"] == "OnFailure"
    (pod, _) = pods_of([job], key="")
    assert (pod.variables["COLLECTIVES_MIN_SIZE"], pod.variables["COLLECTIVES_MAX_SIZE"]) == ("1", "4")
    assert not any(word.startswith(("--min-np", "--max-np")) for word in pod.command)


def test_an_mpijobs_launcher_starts_the_ranks_by_ssh(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = written("--kubernetes-kind mpijob --image i -np 4 --slots-per-host 2 python train.py", capsys)
    launcher, worker = (job["spec"]["mpiReplicaSpecs"][role] for role in ("Launcher", "Worker"))
    (container,) = launcher["template"]["spec"]["containers"]
    assert container["command"][:2] == ["collectivesrun", "--launcher=ssh"] and "-np=4" in container["command"]
    assert (worker["replicas"], job["spec"]["slotsPerWorker"]) == (2, 2)
    assert "COLLECTIVES_KEY" not in str(job)


@pytest.mark.parametrize("kind", KINDS)
def test_schemas(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Kubernetes' own objects; what holds for the pods in objects of other controllers holds for pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate (22 MB)").validate
    manifests = written(f"--kubernetes-kind {kind} --image i -np 8 --gpus-per-pod 4 python train.py", capsys)
    if kind in ("indexed-job", "elastic"):
        for manifest in manifests:
            validate(manifest, "1.31", strict=True)
    for spec in specs(manifests):
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}, "1.31", strict=True)


def test_the_file_says_how_to_start_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "Run_7 big.yaml"
    assert cli.main(["--kubernetes", str(file), "--image", "i", "-np", "2", "--namespace", "team", "python"]) == 0
    text = file.read_text()
    assert f"kubectl -n team apply -f '{file}'" in text
    assert " | kubectl -n team create secret generic run-7-big --from-file=key=/dev/stdin\n" in text
    assert "2 pods of 1 rank:" in capsys.readouterr().err
    assert cli.main(["--kubernetes", "-", "--image", "i", "-np", "3", "--gpus-per-pod", "2", "python"]) == 0
    assert capsys.readouterr().out.startswith("# 2 pods of 2 ranks, the last of 1. To start them:\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--image i python train.py", "-np is missing"),
        ("-np 2 python train.py", "--image is missing"),
        ("--image i -np 2", "no program given"),
        ("--image i -np 2 -H a,b python train.py", "the pods are the hosts"),
        ("--image i -np 2 --launcher ssh python train.py", "the pods are the hosts"),
        ("--image i -np 2 --node 0/2 python train.py", "the pods are the hosts"),
        ("--image i -np 2 --min-np 1 python train.py", "pass --kubernetes-kind elastic too"),
        ("--image i -np 2 --elastic-timeout 9 python train.py", "--elastic-timeout: only for elastic jobs"),
        ("--image i -np 2 --kubernetes-kind elastic --gpus-per-pod 2 python train.py", "expected 2 pods or more"),
        ("--image i -np 2 --job-name 7 python train.py", "--job-name: expected at most 40 lower-case letters"),
        ("--image i -np 2 --namespace a;b python train.py", "--namespace: expected at most 63 lower-case letters"),
        ("--image i -np 2 --kubernetes /no/such/folder/job.yaml python train.py", "cannot write"),
    ],
)
def test_mistakes_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--kubernetes=-", *words.split()]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out


def test_what_a_host_of_several_needs_to_know() -> None:
    told = {"COLLECTIVES_RENDEZVOUS": "tcp://node1:29400", "COLLECTIVES_KEY": "ab" * 16}
    expected = {**told, "MASTER_ADDR": "node1", "MASTER_PORT": "29401"}
    assert meeting(Node(1, 2), 4, {**told, "MASTER_PORT": "1", "RANK": "1"}) == expected
    assert meeting(Node(2, 2), 4, {**told, "COLLECTIVES_ELASTIC": "1"}) == expected
    assert meeting(Node(0, 1), 1, {}) == {}
    with pytest.raises(InvalidArgumentError, match="expected a host number from 0 to 1"):
        meeting(Node(2, 2), 4, told)
    with pytest.raises(InvalidArgumentError, match="expected tcp://host:port, with the address of host 0"):
        meeting(Node(1, 2), 4, {})
    with pytest.raises(
        InvalidArgumentError, match=r"--node 3/4: expected 3 hosts at most, with 2 ranks each, for -np 5"
    ):
        Node(3, 4).ranks(5)


def test_pods_variables_are_put_in_as_the_kubelet_does() -> None:
    pod = Pod("a", ["$(A)", "$$(A)", "$(B)", "$$", "$x"], {"A": "1"})
    assert pod.command == ["1", "$(A)", "$(B)", "$", "$x"]
