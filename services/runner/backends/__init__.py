"""Backends execute attempts somewhere: as processes of this machine, later as pods."""
