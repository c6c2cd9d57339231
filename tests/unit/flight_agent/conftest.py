"""Lets the tests import the example's modules the way the agent does: from its own folder."""

import sys
from pathlib import Path

AGENT = Path(__file__).parents[3] / "examples" / "flight_agent"
sys.path.insert(0, str(AGENT))
