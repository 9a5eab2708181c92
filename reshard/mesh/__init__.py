"""The parts of each tensor on each rank of a mesh, and the possible degrees."""
