"""Formats of Acme's engine."""
