"""Tokens from engines: which engine answers a call, how to ask it, and its answers as checked tokens."""
