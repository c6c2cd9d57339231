"""Ends of an optimisation that the same command continues, once their cause is mended."""

from __future__ import annotations


class PromptError(Exception):
    """A prompt cannot be measured or rewritten; the message names the remedy."""
