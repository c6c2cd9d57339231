"""An optimiser step: gradients, updates, and the metrics of both."""
