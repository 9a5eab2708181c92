"""``python -m reshard.verify ORIGINAL SHARDS``, alone or under torchrun: the same as ``reshard verify``."""

import sys

from reshard.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "verify")
    main()
