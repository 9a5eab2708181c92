"""Moves between running processes: from the ranks of a trainer to those of an engine, without disk or gathering."""
