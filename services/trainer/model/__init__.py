"""The model: which are accepted, and how they compute over token trees, on devices and across them."""
