"""Imported last by the fork server of verify/forward/launch.py: what it has imported is no garbage, in any rank.

A full collection would look through a million objects of torch and transformers. In a rank it would also copy the
memory that they lie in, since to look at an object is to write beside it. What a rank makes after that is a model or
two, which live as long as they are needed, so a rank looks seldom for garbage.
"""

import gc

gc.freeze()
gc.set_threshold(100_000, 50, 50)
