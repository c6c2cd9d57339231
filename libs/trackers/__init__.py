"""Copies the curves of runs to trackers of experiments: TensorBoard's files, Trackio, W&B's files, MLflow.

Reads: the REST API, through the client. Writes: the tracker alone. Promise: each point is at the tracker once, however
often this process is killed, because the tracker itself is asked for the points that it has (ADR 58).
"""
