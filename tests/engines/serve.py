"""Shards served over HTTP: what 'vllm serve' answers from them and from the original, on a CPU.

    python -m tests.engines.serve --python ENGINES/vllm/bin/python [--model llama] [--tp 2]

The command is the one that 'reshard split --as vllm' prints. Both servers have the same degree, so they compute the
same sums in the same order: all tokens and all their log-probabilities must be equal. A third server loads the same
folder with another degree: it must fail, or answer otherwise, so that this comparison is known to see a wrong load.
Exit code 1: something is not as it should be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reshard.api import split
from tests.engines.shards import checkpoint
from tests.engines.vllm_run import SETTINGS

PROMPTS = ([5, 9, 2, 31], [1, 2, 3, 4, 5, 6, 7, 8], [77, 3], [40, 41, 42, 43, 44, 45])
TOKENS = 24
OPTIONS = ("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64", "--max-num-seqs", "4")
PATIENCE = 300.0
"""Seconds for a server to start."""

Answer = Mapping[str, Any]


class NotServedError(Exception):
    """The server ended before it could be asked."""


def main() -> None:
    """Serve the original and its shards, ask both the same, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the python of vLLM's environment")
    parser.add_argument("--model", default="llama", help="a model of tests/zoo")
    parser.add_argument("--tp", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reshard-serve-") as folder:
        sys.exit(0 if compare(Path(folder), arguments.python, arguments.model, arguments.tp) else 1)


def compare(root: Path, python: str, model: str, tp: int) -> bool:
    """Whether the shards answer as the original does, and not with another degree."""
    original = checkpoint(root, model)
    command = split(original, root / "shards", tp=tp, format="vllm").load
    assert command is not None
    degree = f"--tensor-parallel-size {tp}"
    assert degree in command, command
    wanted = answers(python, f"vllm serve {original} {degree}")
    found = answers(python, command)
    same = wanted == found
    print(f"{model} tp {tp}: {differing(wanted, found)} of {len(PROMPTS) * TOKENS} tokens or log-probabilities differ")
    try:
        other = answers(python, command.replace(degree, "--tensor-parallel-size 1"))
        differ = differing(wanted, other)
        print(f"{model} tp {tp} loaded at tp 1: {differ} of {len(PROMPTS) * TOKENS} differ")
    except NotServedError as error:
        differ = 1
        print(f"{model} tp {tp} loaded at tp 1: {error}")
    return same and differ > 0


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    """How many tokens of two servers' answers differ, in themselves or in the log-probability."""
    return sum(
        (a, p) != (b, q)
        for of_one, of_other in zip(one, other, strict=True)
        for a, b, p, q in zip(
            of_one["tokens"], of_other["tokens"], of_one["token_logprobs"], of_other["token_logprobs"], strict=True
        )
    )


def answers(python: str, command: str) -> list[Answer]:
    """What a server that is started by a command answers to the prompts. Raises NotServedError."""
    with served(python, command) as address:
        return [ask(address, prompt) for prompt in PROMPTS]


@contextlib.contextmanager
def served(python: str, command: str) -> Iterator[str]:
    """The address of a server, which ends with the block. Raises NotServedError."""
    port = _free_port()
    program = Path(python).parent / shlex.split(command)[0]
    words = [str(program), *shlex.split(command)[1:], *OPTIONS, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            words, env={**os.environ, **SETTINGS}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1/completions"
        finally:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait(server: subprocess.Popen[bytes], health: str, log: Any) -> None:
    """Until the server answers. Raises NotServedError with its last line."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if server.poll() is not None:
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()
            raise NotServedError(f"vllm serve ended with {server.returncode}: {lines[-1] if lines else ''}")
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(health, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(1)
    raise NotServedError(f"vllm serve did not answer within {PATIENCE:.0f} s")


def ask(address: str, prompt: Sequence[int]) -> Answer:
    """Greedy tokens after a prompt, as ids, with their log-probabilities."""
    request = {
        "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 1, "ignore_eos": True,
        "return_tokens_as_token_ids": True, "detokenize": False,
    }  # fmt: skip
    body, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=PATIENCE) as answer:
        (choice,) = json.load(answer)["choices"]
    found: Answer = choice["logprobs"]
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
