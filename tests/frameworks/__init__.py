"""Agents of every framework against the real gateway: `make test-agents` (`tests/frameworks/suite.py`).

The agents are in `tests/agents/frameworks`, written as each framework's documentation writes them: they import nothing
of ours and read the model's address and key from the environment. `catalog.py` lists them with the call tree that each
framework makes. The results are `docs/frameworks.md`.
"""
