from __future__ import annotations

import re

from tests.support.chaos import SERVICES, fault_points
from tests.support.shared import ROOT


def test_a_soak_finds_every_point_at_which_a_service_may_be_killed() -> None:
    sources = [file.read_text() for folder in ("services", "libs") for file in (ROOT / folder).rglob("*.py")]
    called = sum(len(re.findall(r"\bfault_point\(\"", source)) for source in sources)
    found = fault_points()
    assert "gateway.recorded" in found
    assert {point.split(".")[0] for point in found} == set(SERVICES)
    assert len(found) <= called
