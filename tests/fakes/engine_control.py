"""The former names of the scripted engine."""

from tests.fakes.scripted_engine import ScriptedEngine as FakeEngineControl
from tests.fakes.scripted_engine import running

__all__ = ["FakeEngineControl", "running"]
