"""Wire formats, one class each, chosen by the route; no other package of the gateway handles a wire format."""
