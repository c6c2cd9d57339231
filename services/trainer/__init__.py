"""Turns credited samples into new weights, one optimiser step at a time.

Reads `runs`, `group_credits` and `samples`; writes `steps`, `step_groups`, `step_samples`, `step_replays`,
`policy_versions` and a folder of weights per version. Promises: no optimiser step sees a sample twice or misses one, a
sample is in further steps only as the run's `sampling.replay` says and each use is a row, a sample older than the
allowed lag is never trained, and a resumed run continues bit for bit on a CPU.
"""
