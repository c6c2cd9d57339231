"""The CPU stand-in for an SGLang server: the same HTTP protocol, for laptops and tests.

Reads a Hugging Face folder of weights; writes nothing. Promises: the log-probabilities it reports are those of a plain
float32 forward over the same tokens, in every path (cached, batched, chunked, streamed), and every output token names
the weight version that sampled it. In a cluster the SGLang image replaces it.
"""
