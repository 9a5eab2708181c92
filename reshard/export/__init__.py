"""What a plan is in the words of other programs."""
