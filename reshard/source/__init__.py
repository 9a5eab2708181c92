"""Sources: recognises a checkpoint in whatever format, and opens it."""
