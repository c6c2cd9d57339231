"""Real processes, real Postgres and Redis, an unmodified agent; workers are killed on the way."""
