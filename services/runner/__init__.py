"""Runs agents, which are not ours: one process tree per attempt, bounded, watched, and gone when the attempt is over.

Reads the task queue. Writes `attempts` and `outcomes`, through `libs/queue`. Promises: an agent gets a fresh folder,
the documented environment and nothing of the platform; no process of an attempt outlives it, not even when the runner
is killed; an attempt whose lease was lost settles nothing; what infrastructure broke is never told as an agent's
failure.
"""
