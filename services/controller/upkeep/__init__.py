"""Deletes and prunes the records of runs, beside the ticks."""
