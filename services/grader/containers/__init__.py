"""Graders that are container images: each grading is a Job of the cluster, by Harbor's contract for verifiers."""
