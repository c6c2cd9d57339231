"""Grader: reads attempts that are to count, with tasks, outputs and calls; writes `gradings` and `rollout_rewards`.

Promises: an attempt has one total, whatever dies between grading and writing; a grader that fails is no 0; a grader
that hangs or crashes ends its own process alone.
"""
