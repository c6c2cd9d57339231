"""Tool calls in the format of each model family, from sampled text and as text."""
