"""Trouble made by tests: a TCP proxy that fails on command, between services and what they depend on."""
