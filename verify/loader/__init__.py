"""An engine's own loader as the witness of files: where it puts each element of the original, the shards have it."""
