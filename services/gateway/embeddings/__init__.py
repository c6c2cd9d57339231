"""Embeddings of agents: a server, a pool's engines or the bundled model make them; each request is a span of a tool.

None of them trains: no policy sampled anything.
"""
