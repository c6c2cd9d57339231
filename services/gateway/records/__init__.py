"""Writes model calls to the store before their last byte leaves, and reads them back."""
