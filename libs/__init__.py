"""Code with at least two users among the services; libs never import services."""
