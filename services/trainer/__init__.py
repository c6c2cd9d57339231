"""Turns credited samples into new weights, one optimiser step at a time.

Reads `runs`, `group_credits` and `samples`; writes `steps`, `step_groups`, `step_samples`, `policy_versions` and a
folder of weights per version. Promises: no optimiser step sees a sample twice or misses one, a sample older than the
allowed lag is never trained, and a resumed run continues bit for bit on a CPU.
"""
