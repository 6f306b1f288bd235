"""The pods of a manifest, as Kubernetes would start them: each one's name, command and variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class Pod:
    """A pod that starts ranks.

    Attributes:
        name: by which the others reach it.
        command: with the variables that the kubelet puts in.
        variables: the container's own.
    """

    def __init__(self, name: str, words: Sequence[str], variables: dict[str, str]) -> None:
        self.name, self.variables = name, variables
        self.command = [re.sub(r"\$\$|\$\((\w+)\)", self._put_in, word) for word in words]

    def _put_in(self, match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else self.variables.get(match[1], match[0])


def pods_of(manifests: Sequence[dict[str, Any]], key: str) -> list[Pod]:
    """Return the pods that a manifest's controller makes; ``key`` is what its secret has."""
    job = manifests[-1]
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "PyTorchJob":
        master, workers = (spec["pytorchReplicaSpecs"][role] for role in ("Master", "Worker"))
        size = master["replicas"] + workers["replicas"]
        shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": "23456"}
        pods = [(f"{name}-master-0", master["template"])]
        pods += [(f"{name}-worker-{number}", workers["template"]) for number in range(workers["replicas"])]
        variables = [{**shared, "RANK": str(number)} for number in range(size)]
    else:
        middle = ""
        if job["kind"] == "JobSet":
            middle, spec = "-ranks-0", spec["replicatedJobs"][0]["template"]["spec"]
        subdomain = spec["template"]["spec"].get("subdomain", name)
        pods = [(f"{name}{middle}-{n}.{subdomain}", spec["template"]) for n in range(spec["completions"])]
        variables = [{"JOB_COMPLETION_INDEX": str(number)} for number in range(len(pods))]
    return [_pod(pod_name, template, more, key) for (pod_name, template), more in zip(pods, variables, strict=True)]


def _pod(name: str, template: dict[str, Any], more: dict[str, str], key: str) -> Pod:
    (container,) = template["spec"]["containers"]
    variables = {entry["name"]: entry.get("value", key) for entry in container["env"]}
    return Pod(name, container["command"], {**variables, **more})
