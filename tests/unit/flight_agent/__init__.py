"""Tests of examples/flight_agent."""
