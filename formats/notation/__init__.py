"""The notation: shapes in named axes, sizes as expressions, and the architectures written in them."""
