"""Writes the files of a split or a merge."""
