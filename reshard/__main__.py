"""``python -m reshard``, and what the installed command runs."""

import signal
import sys


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C is one line from the first import on."""
    try:
        from reshard.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("reshard: interrupted\n")
        sys.exit(130)
    finally:
        # The answer has been given: from here on Ctrl-C just ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
