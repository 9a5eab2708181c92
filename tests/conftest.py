"""Settings of all tests."""

import signal

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # speed is a matter for benchmarks, on a quiet machine
settings.load_profile("untimed")

# A shell's background job ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
