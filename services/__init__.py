"""The nine services; each is one folder and one process, and none imports another."""
