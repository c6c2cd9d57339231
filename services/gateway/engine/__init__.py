"""Gets tokens from engines: chooses the engine of a call, sends the request, and validates the sampled tokens."""
