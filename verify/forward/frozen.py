"""Imported last by the fork server of verify/forward/launch.py: what it has imported is no garbage, in any rank.

A full collection would look through a million objects of torch and transformers. In a rank it would also copy the
memory that they lie in, since to look at an object is to write beside it.
"""

import gc

gc.freeze()
