"""Writes output: what files a split or a merge has, and the one path of bytes into them."""
