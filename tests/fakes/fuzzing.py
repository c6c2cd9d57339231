"""schemathesis over a service's OpenAPI document: what every answer to anything must keep.

`make fuzz` sends more than `make test` does, and other things each time.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks

from tests.support.long import LONG

load_all_checks()
KEPT = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
)


def bounded(examples: int, **limits: int) -> settings:
    """So many examples, always the same ones, in `make test-long`; a sixth in `make test`.

    In `make fuzz` as many as its profile says.
    """
    chosen = settings(**limits) if limits else settings.default
    assert chosen is not None
    few = settings(chosen, max_examples=examples if LONG else -(-examples // 6)) if chosen.derandomize else chosen
    # Servers behind the test are slow to answer, and every example asks them something.
    return settings(few, suppress_health_check=list(HealthCheck))


def schema_of(document: dict[str, Any]) -> Any:
    """The document as something that makes requests."""
    return schemathesis.openapi.from_dict(document)


def operations(schema: Any) -> list[Any]:
    """Every operation, for `pytest.mark.parametrize`."""
    return [found.ok() for found in schema.get_all_operations()]


def kept(but: tuple[str, ...] = ()) -> list[Any]:
    """schemathesis' own checks."""
    return [CHECKS.get_one(name) for name in KEPT if name not in but]


def check(case: Any, url: str, headers: dict[str, str], *, but: tuple[str, ...] = ()) -> Any:
    """Sends the case and holds the answer against the document; `but` are checks that its operation cannot keep."""
    return case.call_and_validate(base_url=url, headers=headers, checks=kept(but), timeout=60)
