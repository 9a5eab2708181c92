"""``python -m verify ORIGINAL SHARDS``, alone or under torchrun: the same as ``reshard verify``."""

import sys

from reshard.cli import main

if __name__ == "__main__":
    main(["verify", *sys.argv[1:]])
