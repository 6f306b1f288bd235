"""What the environment says of an elastic job that this process belongs to."""

from __future__ import annotations

import os

from collectives.base.config import parse_address, parse_bool
from collectives.base.errors import InvalidArgumentError
from collectives.transport.stores import job_key
from collectives.worlds.elastic_jobs import DEFAULT_TIMEOUT, TIMEOUT, Job

MEMBER = "COLLECTIVES_MEMBER"
"""The variable with a member's number, by which a process knows that its job is elastic."""


def job() -> Job | None:
    """This process's part in its job; None: the job is not elastic.

    Raises:
        InvalidArgumentError: the variables that make the job elastic are not all there, or wrong.
    """
    text = os.environ.get("COLLECTIVES_ELASTIC", "").strip() or "0"
    try:
        is_elastic = parse_bool(text)
    except ValueError:
        raise InvalidArgumentError(f"COLLECTIVES_ELASTIC={text!r}: expected {parse_bool.__doc__} [E12]") from None
    number = os.environ.get(MEMBER, "")
    if not number:
        if not is_elastic:
            return None
        from collectives.worlds import elastic_members  # with asyncio, which not all programs need

        return elastic_members.from_environment(os.environ)
    key = job_key.from_environment(os.environ)
    try:
        host, port = parse_address(os.environ["COLLECTIVES_RENDEZVOUS"])
        member, timeout = int(number), float(os.environ.get(TIMEOUT, DEFAULT_TIMEOUT))
    except (KeyError, ValueError):
        key = None
    if key is None:
        raise InvalidArgumentError(
            f"{MEMBER}={number!r}: expected a number, together with COLLECTIVES_RENDEZVOUS and COLLECTIVES_KEY; start "
            "the job with collectivesrun --min-np, which sets all three [E13]"
        )
    return Job(member, host, port, key, timeout)
