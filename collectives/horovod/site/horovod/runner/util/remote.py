"""Commands for other hosts."""

from __future__ import annotations

from horovod.runner.common.util import env  # type: ignore[import-not-found]

SSH_COMMAND_PREFIX = "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no"


def get_ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Return the shell command that runs ``local_command`` on the host by SSH."""
    options = [("-p", port), ("-i", identity_file), ("-o ConnectTimeout=", timeout_s)]
    given = [f"{flag}{'' if flag.endswith('=') else ' '}{value}" for flag, value in options if value is not None]
    return " ".join([SSH_COMMAND_PREFIX, host, *given, local_command])


def get_remote_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """Return the shell command that runs ``local_command`` on the host: by Kubeflow's script if in use, else by SSH."""
    if env.is_kubeflow_mpi():
        return f"{env.KUBEFLOW_MPI_EXEC} {host} {local_command}"
    return get_ssh_command(local_command, host, port, identity_file, timeout_s)
