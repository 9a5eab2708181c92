"""Imported first by the fork server of verify/forward/launch.py: puts it, and so its ranks, into a process group of
their own, and says which process it is.

A Ctrl-C in the terminal then reaches only the command, which ends the whole group, also what it does not know of yet.
"""

import os
from pathlib import Path

os.setpgrp()
Path(os.environ["RESHARD_FORK_SERVER"]).write_text(str(os.getpid()))
