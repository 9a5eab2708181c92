"""Runs the shards in the engine that they were written for, and compares what it computes with the original."""
