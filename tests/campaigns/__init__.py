"""Long measurements, each a command of the Makefile."""
