"""Embeddings of agents: a server or the bundled model makes them, and each request is recorded as a span of a tool.

None of them trains: no policy sampled anything.
"""
