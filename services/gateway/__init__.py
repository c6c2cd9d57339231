"""Serves the model to agents: requests in, engine tokens out, every call recorded before its last byte leaves.

Reads `engines` (which engine serves which run) and the run's default temperature; writes `model_calls`. Promises: no
answer without a durable record; every token names the policy version that sampled it; sampled tokens are never encoded
again in later prompts of their attempt; requests wait while engines change weights; a retry of an SDK gets the first
answer and is never sampled twice.
"""
