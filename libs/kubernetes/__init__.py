"""The Kubernetes cluster, as the runner and the controller use it: Jobs, pods, logs, and nothing of Leyden's rows."""
