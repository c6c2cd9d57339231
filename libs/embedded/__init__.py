"""Processes of a laptop and of tests: `servers` runs Postgres and Redis, `launch` ties a child to its parent."""
