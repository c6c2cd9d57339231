"""Turns a conversation into exact prompt tokens, and sampled tokens into an answer."""
