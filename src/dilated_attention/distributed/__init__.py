"""Moves tensors among ranks; knows nothing of attention."""
