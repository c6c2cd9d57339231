"""The only door to the model: chat completions in, engine tokens out, every call recorded before its last byte leaves.

Reads `engines` (who serves which run) and the run's default temperature; writes `model_calls`. Promises: no answer
without a durable record; every token keeps the policy version that sampled it; sampled tokens are never re-encoded in
later prompts of their attempt; requests are held, not refused, while engines change weights; a repeat of an SDK is
replayed and never sampled twice.
"""
