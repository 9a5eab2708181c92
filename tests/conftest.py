"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # speed is a matter for benchmarks, on a quiet machine
settings.load_profile("untimed")
