"""Compares shards with the original, byte for byte."""
