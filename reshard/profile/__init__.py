"""The search for the fastest degree on this node: blocks of a model timed on real ranks, and a model of the cost."""
