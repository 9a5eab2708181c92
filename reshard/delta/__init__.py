"""Differences between two checkpoints of a model: found, stored as a delta, and put back."""
