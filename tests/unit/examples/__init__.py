"""Tests of the examples whose agents are taught before they are trained."""
