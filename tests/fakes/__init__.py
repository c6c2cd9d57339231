"""Fakes of services and models for tests."""
