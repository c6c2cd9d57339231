"""From a conversation to exact tokens, and from sampled tokens back to an answer."""
