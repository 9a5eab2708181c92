"""Checks with the real programs, in environments of their own: ``make engines`` runs them, pytest the stand-ins."""
