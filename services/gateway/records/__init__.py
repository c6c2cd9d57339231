"""The gateway and the store: model calls written before their last byte leaves, and read back."""
