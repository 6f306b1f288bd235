"""``collectivesrun --kubernetes FILE``: a manifest of the job for Kubernetes; nothing is started.

    pod 0   collectivesrun --node=0/2 ...   -> ranks 0 to 3     serves the store at NAME-0.NAME:29400
    pod 1   collectivesrun --node=1/2 ...   -> ranks 4 to 7

The command in each pod is the user's own, but for the options that are about Kubernetes; so all others mean what they
mean elsewhere. In an MPIJob a launcher starts the ranks in the other pods by ssh.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collectives.base.errors import InvalidArgumentError
from collectives.launch import elastic_options

Words = list[str]
Manifest = dict[str, Any]

PORT = 29400
"""Where rank 0's pod serves the store; torch's ranks, if a program makes any, meet at the next one."""
SSH_PORT = 2222
HOME = "/home/trainer"
"""Of the user of the images of ``docker/``, where the MPI operator puts the keys for ssh."""
_MOST_LETTERS = 40
"""Of a job's name: with what controllers append, the name of a pod has at most 63."""
_OWN = ("--kubernetes", "--kubernetes-kind", "--image", "--gpus-per-pod", "--job-name", "--namespace")
_ELASTIC = ("--min-np", "--min-num-proc", "--max-np", "--max-num-proc")
_NOT_OF_PODS = (*_OWN, *_ELASTIC, "--slots-per-host", "--slots")
_RESTARTS = 3
_ELASTIC_RESTARTS = 100


def add_to(parser: argparse.ArgumentParser, positive: Callable[[str], object]) -> None:
    """Add the options to a parser; ``positive`` is the type of numbers."""
    group = parser.add_argument_group("Kubernetes (nothing is started)")
    add = group.add_argument
    file = add("--kubernetes", metavar="FILE")
    file.help = "write a manifest of the job to a file (-: stdout); start it with kubectl"
    kind = add("--kubernetes-kind", choices=tuple(_KINDS), default="indexed-job")
    kind.help = "the kind of manifest (default: indexed-job)"
    add("--image", help="the container image that has the program and collectives")
    gpus = add("--gpus-per-pod", metavar="N", type=positive)
    gpus.help = "NVIDIA GPUs of each pod, and its number of ranks; for pods without GPUs, pass --slots-per-host"
    add("--job-name", metavar="NAME", help="the name of the job and of its service (default: the file's)")
    add("--namespace", metavar="NAME", help="the namespace of the job (default: kubectl's)")


@dataclass(frozen=True)
class Pods:
    """The pods of a job.

    Attributes:
        name: of the job, its service, and the secret with its key.
        count: pods; ``ranks``: of all; ``slots``: ranks of each, but for the last one, which may have fewer.
        options: of ``collectivesrun`` in each pod; ``program``: after those.
        elastic: variables of an elastic job.
    """

    name: str
    namespace: str
    image: str
    count: int
    ranks: int
    slots: int
    gpus: int
    options: Sequence[str]
    program: Sequence[str]
    elastic: Mapping[str, str]

    def manifest(self, version: str, kind: str, spec: Manifest) -> Manifest:
        """Return an object with the job's name."""
        metadata = {"name": self.name, **({"namespace": self.namespace} if self.namespace else {})}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}

    def template(self, number: str, host: str, name: str = "ranks", **spec: Any) -> Manifest:
        """Return the template of a pod that starts its ranks.

        Args:
            number: the variable with the pod's number; ``host``: the name of pod 0.
            name: of the container.
            spec: more about the pod.
        """
        environment: list[Manifest] = [
            {"name": "COLLECTIVES_RENDEZVOUS", "value": f"tcp://{host}:{PORT}"},
            {"name": "COLLECTIVES_KEY", "valueFrom": {"secretKeyRef": {"name": self.name, "key": "key"}}},
            *({"name": variable, "value": text} for variable, text in self.elastic.items()),
        ]
        container = self.container(name, self.command(f"--node=$({number})/{self.count}"), env=environment)
        return self.pod(container, **spec)

    def command(self, *options: str) -> Words:
        """Return the command with further options."""
        # A dollar sign is doubled, for Kubernetes replaces $(NAME).
        words = [word.replace("$", "$$") for word in (*self.options, *self.program)]
        return ["collectivesrun", *options, *words]

    def container(self, name: str, command: Words, *, alone: bool = False, **more: object) -> Manifest:
        """Return a container; ``alone``: it has no ranks."""
        made: Manifest = {"name": name, "image": self.image, "command": command, **more}
        if self.gpus and not alone:
            made["resources"] = {"limits": {"nvidia.com/gpu": self.gpus}}
        return made if alone else {**made, "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}]}

    def pod(self, container: Manifest, **spec: object) -> Manifest:
        """Return the template of a pod with a container, and room in /dev/shm, where it has 64 MiB otherwise."""
        shared_memory = {"medium": "Memory", "sizeLimit": f"{self.slots}Gi"}
        volumes = [{"name": "shared-memory", "emptyDir": shared_memory}] if "volumeMounts" in container else []
        said = {"terminationGracePeriodSeconds": 30, **spec, "containers": [container]}
        return {
            "metadata": {"labels": {"app": self.name}},
            "spec": {**said, **({"volumes": volumes} if volumes else {})},
        }


def indexed_job(pods: Pods) -> list[Manifest]:
    """A headless Service, by which pods find pod 0, and a Job that ends with its first failure."""
    return [_service(pods), pods.manifest("batch/v1", "Job", _job(pods, f"{pods.name}-0.{pods.name}"))]


def elastic(pods: Pods) -> list[Manifest]:
    """The same, but pods that fail are started again, and join the others."""
    spec = _job(pods, f"{pods.name}-0.{pods.name}", restartPolicy="OnFailure")
    return [_service(pods), pods.manifest("batch/v1", "Job", {**spec, "backoffLimit": _ELASTIC_RESTARTS})]


def jobset(pods: Pods) -> list[Manifest]:
    """A JobSet, which starts all pods again when one fails. It makes the service itself."""
    job = _job(pods, f"{pods.name}-ranks-0-0.{pods.name}")
    del job["template"]["spec"]["subdomain"]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # New pods do not meet old ones, which are waited for.
        "failurePolicy": {"maxRestarts": _RESTARTS, "restartStrategy": "BlockingRecreate"},
        "replicatedJobs": [{"name": "ranks", "replicas": 1, "template": {"spec": job}}],
    }
    return [pods.manifest("jobset.x-k8s.io/v1alpha2", "JobSet", spec)]


def pytorchjob(pods: Pods) -> list[Manifest]:
    """A PyTorchJob of Kubeflow's training operator 1.x, which numbers its pods as torchrun's nodes."""

    def replicas(count: int) -> Manifest:
        template = pods.template("RANK", f"{pods.name}-master-0", "pytorch")
        return {"replicas": count, "restartPolicy": "Never", "template": template}

    workers = {"Worker": replicas(pods.count - 1)} if pods.count > 1 else {}
    spec = {"runPolicy": {"cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": {"Master": replicas(1), **workers}}
    return [pods.manifest("kubeflow.org/v1", "PyTorchJob", spec)]


def mpijob(pods: Pods) -> list[Manifest]:
    """An MPIJob: its launcher starts the ranks in the workers by ssh, and makes their key."""
    words = pods.command("--launcher=ssh", f"--ssh-port={SSH_PORT}", "--hostfile=/etc/mpi/hostfile")
    server = ["/usr/sbin/sshd", "-De", "-f", f"{HOME}/.sshd_config"]
    worker = pods.container("ranks", server, readinessProbe={"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2})
    spec = {
        "slotsPerWorker": pods.slots,
        "sshAuthMountPath": f"{HOME}/.ssh",
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "template": pods.pod(pods.container("launcher", words, alone=True))},
            "Worker": {"replicas": pods.count, "template": pods.pod(worker)},
        },
    }
    return [pods.manifest("kubeflow.org/v2beta1", "MPIJob", spec)]


_KINDS: dict[str, Callable[[Pods], list[Manifest]]] = {
    "indexed-job": indexed_job,
    "jobset": jobset,
    "pytorchjob": pytorchjob,
    "mpijob": mpijob,
    "elastic": elastic,
}


def _service(pods: Pods) -> Manifest:
    """Return a service that gives each pod a name, also before it is ready, as it is once all have met."""
    spec = {
        "clusterIP": "None",
        "selector": {"app": pods.name},
        "publishNotReadyAddresses": True,
        "ports": [{"name": "rendezvous", "port": PORT}],
    }
    return pods.manifest("v1", "Service", spec)


def _job(pods: Pods, host: str, **spec: Any) -> Manifest:
    """Return what an Indexed Job is to do; ``host`` is the name of pod 0, ``spec`` more about the pods."""
    spec = {"subdomain": pods.name, "restartPolicy": "Never", **spec}
    return {
        "completionMode": "Indexed",
        "completions": pods.count,
        "parallelism": pods.count,
        "backoffLimit": 0,
        "template": pods.template("JOB_COMPLETION_INDEX", host, **spec),
    }


def write(
    parser: argparse.ArgumentParser, options: argparse.Namespace, own: Sequence[str], program: Sequence[str]
) -> None:
    """Write the manifest that parsed options ask for.

    Args:
        own: the words of the options, with ``=`` between an option and its value.
        program: the user's command.

    Raises:
        InvalidArgumentError: some make no sense, or not together; or the file cannot be written.
    """
    import yaml

    kept = [word for word in own if word.partition("=")[0] not in _NOT_OF_PODS]
    pods = _pods(parser, options, kept, program)
    text = _head(pods, options) + yaml.safe_dump_all(_KINDS[options.kubernetes_kind](pods), sort_keys=False, width=120)
    if options.kubernetes == "-":
        sys.stdout.write(text)
        return
    try:
        Path(options.kubernetes).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(
            f"--kubernetes: cannot write {options.kubernetes!r}: {error.strerror} [L81]"
        ) from None
    print(
        f"collectivesrun: {options.kubernetes} has {_size(pods)}: its first lines say how to start it", file=sys.stderr
    )


def _pods(
    parser: argparse.ArgumentParser, options: argparse.Namespace, kept: Sequence[str], program: Sequence[str]
) -> Pods:
    of_pods = parser.parse_args(list(kept))
    if elastic_options.wanted(of_pods) or of_pods.hosts or of_pods.hostfile or of_pods.node or of_pods.launcher:
        raise InvalidArgumentError(
            "--kubernetes: the pods are the hosts; leave out --hosts, --hostfile, --host-discovery-script, --node and "
            "--launcher [L82]"
        )
    is_elastic = options.kubernetes_kind == "elastic"
    for holds, message in (
        (
            program,
            "no program given; write: collectivesrun --kubernetes job.yaml --image IMAGE -np N python train.py [L83]",
        ),
        (options.ranks, "-np is missing: pass the number of ranks, such as -np 8 [L84]"),
        (
            options.image,
            "--image is missing: pass the container image that has the program, such as registry/train:1 [L85]",
        ),
        (
            is_elastic or not (options.min_np or options.max_np),
            "--min-np, --max-np: only for elastic jobs; pass --kubernetes-kind elastic too [L86]",
        ),
    ):
        if not holds:
            raise InvalidArgumentError(message)
    count = -(-options.ranks // (options.slots_per_host or options.gpus_per_pod or 1))
    if is_elastic and count < 2:
        raise InvalidArgumentError(
            f"--kubernetes-kind elastic: expected 2 pods or more, got 1 for -np {options.ranks}; raise -np, or lower "
            "--slots-per-host or --gpus-per-pod [L87]"
        )
    sizes = {"COLLECTIVES_MIN_SIZE": options.min_np, "COLLECTIVES_MAX_SIZE": options.max_np}
    return Pods(
        _name(options.job_name, options.kubernetes),
        _namespace(options.namespace),
        options.image,
        count,
        options.ranks,
        -(-options.ranks // count),
        options.gpus_per_pod or 0,
        kept,
        program,
        {"COLLECTIVES_ELASTIC": "1", **{name: str(size) for name, size in sizes.items() if size}} if is_elastic else {},
    )


def _name(given: str | None, file: str) -> str:
    """Return the job's name: as given, or like its file's."""
    if not file.isprintable():
        raise InvalidArgumentError(f"--kubernetes: expected a file name without line breaks, got {file!r} [L143]")
    stem = "job" if file == "-" else Path(file).stem
    name = re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-") if given is None else given
    if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _MOST_LETTERS:
        raise InvalidArgumentError(
            f"--job-name: expected at most {_MOST_LETTERS} lower-case letters, digits and '-', beginning with a "
            f"letter and not ending with '-', got {name!r} [L88]"
        )
    return name


def _namespace(given: str | None) -> str:
    if given is not None and not re.fullmatch("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", given):
        raise InvalidArgumentError(
            "--namespace: expected at most 63 lower-case letters, digits and '-', not beginning or ending with '-', "
            f"got {given!r} [L89]"
        )
    return given or ""


def _size(pods: Pods) -> str:
    last = pods.ranks - (pods.count - 1) * pods.slots
    fewer = f", the last of {last}" if last < pods.slots else ""
    return f"{pods.count} pod{'s' * (pods.count > 1)} of {pods.slots} rank{'s' * (pods.slots > 1)}{fewer}"


def _head(pods: Pods, options: argparse.Namespace) -> str:
    """Return comments that say how to start the job."""
    kubectl = "kubectl" + (f" -n {pods.namespace}" if pods.namespace else "")
    file = "FILE" if options.kubernetes == "-" else shlex.quote(options.kubernetes)
    lines = [f"{_size(pods)}. To start them:"]
    if options.kubernetes_kind != "mpijob":
        lines += [
            "the key that the ranks prove to each other, once, in no file and no list of processes:",
            "  openssl rand -hex 32 | tr -d '\\n' | "
            f"{kubectl} create secret generic {pods.name} --from-file=key=/dev/stdin",
            "and each time:",
        ]
    return "".join(f"# {line}\n" for line in [*lines, f"  {kubectl} apply -f {file}"])
