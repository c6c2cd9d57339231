"""Attempts as process trees of this machine, for agents whose code is trusted."""
