"""Decides about runs: their phases, the groups that they may sample, the ends of attempts and of training."""
