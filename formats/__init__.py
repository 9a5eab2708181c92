"""Checkpoints as they are: the notation of shapes, the architectures, and the files on disk."""
