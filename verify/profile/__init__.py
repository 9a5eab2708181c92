"""Which degree is fast on this node: blocks of a model timed on real ranks, and a model of the cost beside them."""
