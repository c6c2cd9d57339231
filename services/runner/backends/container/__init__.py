"""The backend that executes each attempt as a container of podman or docker on this machine."""
