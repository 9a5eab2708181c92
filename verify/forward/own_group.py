"""Imported first by the fork server of verify/launch.py: puts it, and so its ranks, into a process group of their own.

A Ctrl-C in the terminal then reaches only the command, which ends the whole group, also what it does not know of yet.
"""

import os

os.setpgrp()
