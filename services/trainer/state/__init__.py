"""A run's files: versions and checkpoints, how they are written, read and resumed from."""
