"""Improves prompts of agents by GEPA: a reflection model rewrites them after it has read rollouts and their rewards.

Reads and writes: the REST API, through the client, and one folder. Promise: an optimisation that was killed goes on by
the same command, and asks for no rollout and no rewritten prompt twice (ADR 60).
"""
