"""One rank of a sharded model: what runs in the process of a rank."""
