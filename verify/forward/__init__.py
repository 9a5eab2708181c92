"""Whether the shards compute what the original computes: what runs in the parent process."""
