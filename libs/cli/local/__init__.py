"""The platform of this machine: its supervisor, services and files."""
