"""Model configuration, weights, state and the one forward pass."""
