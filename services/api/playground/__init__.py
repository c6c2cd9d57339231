"""Lets a person try the policy that a run's engines serve: one question, one streamed answer, no record of either."""
