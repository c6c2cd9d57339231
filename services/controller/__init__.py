"""Decides for the whole platform: the tasks to sample, the run that trains, the weights that engines serve.

Reads runs, evaluations, attempts, outcomes, group verdicts, steps and policy versions. Writes `run_status`, `groups`,
`rollouts` and `engines`, and expires leases through `libs/queue`. Promises: one leader at a time; no group is admitted
whose tokens could be too old when they are trained; infrastructure failures never become rewards; another process may
repeat every tick without a second row.
"""
