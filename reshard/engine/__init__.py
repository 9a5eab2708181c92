"""Moves bytes from one layout to another."""
