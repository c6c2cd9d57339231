"""Fault injection for tests: a TCP proxy that fails on command, between services and their dependencies."""
