"""``python -m verify ORIGINAL SHARDS``, alone or under torchrun: the same as ``reshard verify``."""

import sys

if __name__ == "__main__":
    try:
        from reshard.__main__ import main
    except ImportError as error:
        sys.exit(f"Error: {error}")
    sys.argv.insert(1, "verify")
    main()
