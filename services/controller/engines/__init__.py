"""Brings every engine of every pool to the versions that runs should serve."""
