"""Moves between running processes: a trainer's ranks to an engine's, without disk and without gathering."""
