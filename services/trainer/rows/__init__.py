"""Rows of a batch: which groups a step trains, how rows share their beginnings, and what each token weighs."""
