"""``python -m verify ORIGINAL SHARDS``, alone or under torchrun: the same as ``reshard verify``."""

import sys

if __name__ == "__main__":
    from reshard.__main__ import main

    sys.argv.insert(1, "verify")
    main()
