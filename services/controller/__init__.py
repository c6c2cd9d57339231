"""The one decision-maker: what is sampled next, which trainer runs, which weights are served.

Reads runs, evaluations, attempts, outcomes, group verdicts, steps and policy versions. Writes `run_status`, `groups`,
`rollouts` and `engines`, and expires leases through `libs/queue`. Promises: one leader at a time; no group is admitted
whose tokens could be older than the run's bound when they are trained; infrastructure failures never become rewards;
every tick may be repeated by another process without a second row.
"""
