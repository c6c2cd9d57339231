"""Runs agents, which are not ours: one process tree per attempt, bounded, watched, and gone when the attempt is over.

Reads the task queue. Writes `attempts` and `outcomes`, through `libs/queue`. Promises: an agent gets a fresh folder,
the documented environment and nothing of the platform; no process of an attempt outlives it, not even when the runner
is killed; an attempt that lost its lease settles nothing; a failure of the infrastructure never counts as an agent's.
"""
