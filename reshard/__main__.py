"""The entry point of ``python -m reshard`` and of the installed command."""

import atexit
import gc
import os
import signal
import sys

GARBAGE = 100_000
"""New objects before Python looks for unreachable ones. A plan makes many, and hardly any become unreachable."""


def main() -> None:
    """Run the command line and exit with its code; Ctrl-C and SIGTERM are one line from the first import on."""
    signal.signal(signal.SIGTERM, terminate)
    gc.set_threshold(GARBAGE)
    atexit.register(gc.freeze)  # the system takes back the memory faster than a last search
    open_closed_streams()
    try:
        from reshard.cli.commands import main as run

        run()
    except KeyboardInterrupt as stop:
        sys.stderr.write("reshard: interrupted\n")
        sys.exit(getattr(stop, "code", 130))
    finally:
        # The answer has been given: from here on Ctrl-C just ends the process.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class TerminatedError(KeyboardInterrupt):
    """SIGTERM: a scheduler, such as Slurm or Kubernetes, ends this process."""

    code = 128 + signal.SIGTERM


def terminate(*_: object) -> None:
    """Let this process end as on Ctrl-C: what is kept is kept, and said."""
    raise TerminatedError


def open_closed_streams() -> None:
    """Let a standard stream that is closed (``>&-``) lead nowhere, or the next file that is opened would be it."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


if __name__ == "__main__":
    main()
