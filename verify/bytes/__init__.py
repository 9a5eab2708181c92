"""Byte for byte: whether the shards hold what the original holds."""
