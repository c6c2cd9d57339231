"""Keeps a trainer for each run that needs one: as a process of this machine, or as a Job of a Kubernetes cluster."""
