"""Proofs that a split checkpoint is the same model: byte for byte, and by running it on N ranks."""
