"""The backend that executes each attempt as a Job of a Kubernetes cluster."""
