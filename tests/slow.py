"""On import, the engine of this process writes slowly and in small steps, so that there is time to interrupt it."""

import os
import time

import reshard.engine.jobs
import reshard.engine.move
import reshard.engine.reading

_real = os.pwrite


def _slow(*arguments):
    time.sleep(0.002)
    return _real(*arguments)


os.pwrite = _slow
reshard.engine.move.STEP = 1200
reshard.engine.jobs.SMALL = 100  # most tensors go the way of large ones
reshard.engine.reading.PIECE = 600
