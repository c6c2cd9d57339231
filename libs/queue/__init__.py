"""The task queue: Postgres leases work, Redis delivers it and wakes waiting processes.

`leases` gives a rollout to one owner at a time, fenced by a lease id. `stream` delivers rollout ids to runners, and
`notifications` announces changed rows. Both use Redis, which may lose all data at any moment:
`leases.deliverable_rollouts` restores the stream, and a lost notification costs one poll interval.
"""
