"""What a checkpoint is: the notation of shapes, the architectures, and the files on disk."""
