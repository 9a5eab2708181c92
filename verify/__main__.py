"""``python -m verify ORIGINAL SHARDS``, alone or under torchrun."""

from verify.cli import verify_command

if __name__ == "__main__":
    verify_command(prog_name="python -m verify")
