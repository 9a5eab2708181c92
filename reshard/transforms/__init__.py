"""What a folder holds: recognises a checkpoint in whatever format, and opens it."""
