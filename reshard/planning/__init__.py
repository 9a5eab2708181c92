"""What each rank of a mesh owns of a checkpoint: decided from headers and config.json alone."""
