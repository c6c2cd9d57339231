"""The former names of the scripted engine."""

from tests.fakes.scripted_engine import ScriptedEngine as FakeEngine
from tests.fakes.scripted_engine import logprob_of, running

__all__ = ["FakeEngine", "logprob_of", "running"]
