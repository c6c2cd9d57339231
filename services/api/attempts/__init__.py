"""Attempts of agents that the platform does not start: clients lease them, renew them and report their ends.

It writes `attempts` and `outcomes` as the runner does, through `libs/queue`; the controller alone ends overdue leases.
"""
