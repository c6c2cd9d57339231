"""Samplers of a call: the engines of its run, or the model of another provider."""
