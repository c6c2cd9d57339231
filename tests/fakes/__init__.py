"""Stand-ins for what a test does not want to run."""
