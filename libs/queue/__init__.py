"""The task queue: leases in Postgres say who works on what, Redis delivers and wakes.

`leases` is the truth: a rollout is worked on by whoever holds its live attempt, fenced by a lease id. `stream` hands
rollout ids to runners and `notifications` tells waiting services that something changed.
Both live in Redis, which may be wiped at any moment:
`leases.deliverable_rollouts` derives the stream again, and a lost wake-up costs one poll interval.
"""
