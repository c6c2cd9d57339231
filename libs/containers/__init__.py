"""Containers of this machine, through the programs podman and docker."""
