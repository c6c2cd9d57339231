"""Checks that `make lint` runs."""
