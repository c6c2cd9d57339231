"""Builds the missing environments, or those that the arguments name."""

from __future__ import annotations

import sys

from tests.frameworks.environments import build, names

for name in sys.argv[1:] or names():
    build(name)
