"""Opens checkpoints, from a folder or the Hub, and publishes finished output."""
