"""Where checkpoints are read from, and how output is put in its place."""
