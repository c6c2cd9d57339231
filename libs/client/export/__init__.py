"""Rollouts of a run as files that other tools read: one format a module, all behind `Format`.

Conversations come from model calls (`conversations`), rows from conversations (`atif`, `openai`, `trl`, `pairs`).
"""

from leyden.libs.client.export.export import FORMATS, Export

__all__ = ["FORMATS", "Export"]
