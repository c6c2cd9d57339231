"""The REST API: the interface for people and CI.

Reads: everything.
Writes: `datasets`, `tasks`, `runs`, `evaluations`, `external_rewards`, `feedback`, `api_tokens`, `idempotency_keys`.
Promises: a dataset is stored whole or not at all; a create with an Idempotency-Key happens once; a refused document
says which field and what to write.
"""
