"""Runs, evaluations, rollouts, calls and metrics as the API shows them."""
