"""The life of a run: its facts, phases, admissions and rollouts, and all that stays of it until it is deleted."""
