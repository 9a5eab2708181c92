"""Two ranks train under FSDP2 and push into a running 'vllm serve', on a CPU: its tokens must be transformers'.

    python -m tests.engines.live_train --python ENGINES/vllm/bin/python [--cases llama:2,qwen3_moe:2]

The server starts with random weights (``--load-format dummy``). The trainer pushes, makes a step, pushes again, makes
a step of a few weights, and pushes what changed. After each push all greedy tokens must equal those of transformers
with the trainer's weights. Exit code 1: they do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from reshard import live
from tests import zoo
from tests.engines import serve
from tests.engines.live_vllm import ROOT, SETTINGS
from tests.live.trainers import sharded, without_gathers

CASES = ("llama:1", "llama:2", "qwen3_moe:2")
WORLD = 2
TIMEOUT = 60.0
"""Seconds that a process waits for the others: this machine is small."""


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the python of vLLM's environment, which has reshard too")
    parser.add_argument("--cases", default=",".join(CASES), help="models of tests/zoo, and tensor parallel degrees")
    arguments = parser.parse_args()
    os.environ.update(VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(ROOT))
    good = True
    for case in arguments.cases.split(","):
        name, tp = case.split(":")
        with tempfile.TemporaryDirectory(prefix="reshard-live-") as folder:
            good &= pushed(zoo.save(name, Path(folder) / "model", settings=SETTINGS), arguments.python, name, int(tp))
    sys.exit(0 if good else 1)


def pushed(folder: Path, python: str, name: str, tp: int) -> bool:
    """Whether a server answers as the trainer's model, after each of three pushes; prints what was measured."""
    command = (
        f"vllm serve {folder} --tensor-parallel-size {tp} --dtype float32 --load-format dummy "
        """--weight-transfer-config '{"backend": "reshard"}' """
        "--worker-extension-cls tests.engines.live_vllm_worker.Extension"
    )
    with serve.served(python, command) as address:
        store = f"tcp://127.0.0.1:{_free_port()}"
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=train, args=(folder, address, store, tp, rank)) for rank in range(WORLD)]
        try:
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(600)
        finally:
            for rank in ranks:
                rank.kill()
    said = json.loads((folder / "said.json").read_text(encoding="utf-8")) if (folder / "said.json").exists() else []
    for number, (right, size, seconds, sent) in enumerate(said):
        print(f"{name}, FSDP2 {WORLD} to vLLM tp {tp}, push {number + 1}: {right} of {size} tokens are transformers', "
              f"{sent:,} bytes from rank 0, {seconds:.3f} s with pause and resume", flush=True)  # fmt: skip
    few = len(said) == 3 and said[2][3] < said[1][3] / 2
    return few and all(right == size for right, size, _, _ in said)


def train(folder: Path, address: str, store: str, tp: int, rank: int) -> None:
    """A rank of the trainer."""
    model = sharded(folder, "trainers", rank, WORLD)
    server = live.Server(address.removesuffix("/v1/completions"))
    push = live.push(model, to=f"vllm:tp{tp}", store=store, rank=rank, world=WORLD, timeout=TIMEOUT)
    live.join(push, server if rank == 0 else None)
    optimizer, said = torch.optim.SGD(model.parameters(), lr=0.5), list[Any]()
    for version in (1, 2, 3):
        start = time.perf_counter()
        with without_gathers():
            sent = live.update(push, server if rank == 0 else None, version, delta=True)
        seconds = time.perf_counter() - start
        said.append((*_compared(folder, model, address, rank), seconds, sum(sent.sent.values())))
        loss = model(torch.arange(40).view(2, 20) + rank).logits.float().log_softmax(-1)[..., 7].mean()
        (-loss).backward()
        for name, parameter in model.named_parameters():
            if version == 2 and "down_proj" not in name:
                parameter.grad = None  # the third push sends what changed
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        (folder / "said.json").write_text(json.dumps(said), encoding="utf-8")
    push.close()
    os._exit(0)


def _compared(folder: Path, model: torch.nn.Module, address: str, rank: int) -> tuple[int, int]:
    """How many of the server's tokens are those of transformers with the trainer's weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    if rank:
        return 0, 0
    alone = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    alone.load_state_dict(whole, strict=False)
    right = 0
    for prompt in serve.PROMPTS:
        tokens = torch.tensor([prompt])
        with torch.no_grad():
            for _ in range(serve.TOKENS):
                tokens = torch.cat([tokens, alone(tokens).logits[:, -1:].argmax(-1)], 1)
        found = [int(token.removeprefix("token_id:")) for token in serve.ask(address, prompt)["tokens"]]
        right += sum(a == b for a, b in zip(found, tokens[0, len(prompt) :].tolist(), strict=True))
    return right, len(serve.PROMPTS) * serve.TOKENS


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    main()
