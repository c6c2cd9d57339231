"""A platform on Kubernetes, reached by kubectl with the caller's own rights."""
