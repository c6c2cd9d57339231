"""The task queue: Postgres leases work, Redis delivers it and wakes those who wait.

`leases` decides who works on a rollout: the owner of its live attempt, fenced by a lease id. `stream` delivers rollout
ids to runners, and `notifications` says that something changed. Both live in Redis, which may be wiped at any moment:
`leases.deliverable_rollouts` derives the stream again, and a lost notification costs one poll interval.
"""
