"""Builds and parses identifiers; those derived from a natural key make repeated writes idempotent."""

import re
import secrets

_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"

NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
"""A number inside an address or a label; leading zeros are refused, so that each number has one spelling."""


def new_id(prefix: str, length: int = 10) -> str:
    """Returns a random identifier such as `run-k3m9x2abcd`; ten of 32 symbols have 50 random bits."""
    return f"{prefix}-{''.join(secrets.choice(_ALPHABET) for _ in range(length))}"


def evaluation_id(run_id: str, number: int) -> str:
    """`run-abc.e1`: the first evaluation of a run."""
    return f"{run_id}.e{number}"


def group_id(owner_id: str, number: int) -> str:
    """`run-abc.12` for training (owner is the run), `run-abc.e1.12` for an evaluation (owner is the evaluation)."""
    return f"{owner_id}.{number}"


def rollout_id(group: str, sibling: int) -> str:
    """`run-abc.12.3`: the fourth sibling of a group (siblings count from 0)."""
    return f"{group}.{sibling}"


def sample_id(rollout: str, branch: int) -> str:
    """`run-abc.12.3:0`: the first root-to-leaf path of a rollout."""
    return f"{rollout}:{branch}"


def run_of(rollout: str) -> str:
    """Returns the run id at the beginning of a group or rollout id."""
    return rollout.split(".", 1)[0]


def is_training(rollout: str) -> bool:
    """Whether a rollout is a training group's, and no evaluation's: `run-abc.12.3`, not `run-abc.e1.12.3`."""
    return rollout.count(".") == 2


def new_call_id() -> str:
    """Returns a model call's id: `c` and 24 hexadecimal digits (96 random bits)."""
    return "c" + secrets.token_hex(12)


def weight_version(run_id: str, version: int) -> str:
    """Returns the `weight_version` of an engine that serves this policy version: `run-abc:3`."""
    return f"{run_id}:{version}"


def parse_weight_version(text: str) -> tuple[str, int]:
    """Parses run and policy version from an engine's `weight_version`.

    Raises: ValueError: the engine serves weights that are no run's policy version.
    """
    run_id, separator, version = text.rpartition(":")
    if not separator or not NUMBER.fullmatch(version):
        raise ValueError(
            f"weight_version {text!r} is not '<run>:<version>': the engine has not been given a policy yet"
        )
    return run_id, int(version)
