"""The forward pass of shards, compared with the original's: the part that runs in the parent process."""
