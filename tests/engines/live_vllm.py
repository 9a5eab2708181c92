"""Pushes into a running vLLM, on a CPU: it must answer as one that was started with the new weights.

    python -m tests.engines.live_vllm --python ENGINES/vllm/bin/python [--cases llama:1,mixtral:2]

The engine is started with ``load_format="dummy"`` and receives two pushes, one that one rank does not get, and two that
fail while weights are exchanged. After each, all greedy tokens and their log-probabilities must equal those of a fresh
engine, bit for bit; a failed push must leave the old ones, and a model that is half new must not answer. The loaders of
the running model are asked where they put each element. Exit code 1: something is not as it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.formats.errors import LiveError
from reshard.live.vllm import Server, update
from tests import zoo
from tests.engines import serve
from tests.engines.shards import SIZES
from tests.engines.vllm_run import ROOT, in_vllm, sent

CASES = ("llama:1", "llama:2", "mixtral:1", "mixtral:2", "qwen2-tied:2", "llama:2:http")
SETTINGS = {**SIZES, "max_position_embeddings": 512, "vocab_size": 203}
"""Prompts longer than a block of the cache; a vocabulary that vLLM pads."""
PROMPTS = ([5, 9, 2, 31], [*range(3, 135)], [*range(40, 100)] * 2, [77, 3])
"""Two are longer than a block of the cache (128 tokens on a CPU): the second time, they are answered from it."""
TOKENS, LENGTH = 24, 256

Answer = Sequence[Sequence[Sequence[float]]]


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the python of vLLM's environment, which has reshard too")
    parser.add_argument("--cases", default=",".join(CASES), help="models of tests/zoo, and tensor parallel degrees")
    arguments = parser.parse_args()
    wrong = []
    for case in arguments.cases.split(","):
        with tempfile.TemporaryDirectory(prefix="reshard-live-") as folder:
            name, tp, *http = case.split(":")
            one = over_http if http else compare
            wrong += [f"{case}: {line}" for line in one(Path(folder), arguments.python, name, int(tp))]
    print("\n".join(wrong) or "all as it should be")
    sys.exit(1 if wrong else 0)


def over_http(root: Path, python: str, name: str, tp: int) -> list[str]:
    """The same with 'vllm serve': a push while it serves, one that fails, and what it answers."""
    folders, store = [checkpoint(root, name, version) for version in (0, 1)], root / "store"
    store.mkdir()
    split(folders[1], store / "1", tp=tp, format="vllm")
    (store / "2").mkdir()
    os.environ.update(VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(ROOT))
    degree = f"--tensor-parallel-size {tp} --worker-extension-cls tests.engines.live_vllm_worker.Extension"
    fresh = serve.answers(python, f"vllm serve {folders[1]} {degree}")
    backend = """--load-format dummy --weight-transfer-config '{"backend": "reshard"}'"""
    wrong = []
    with serve.served(python, f"vllm serve {folders[0]} {degree} {backend}") as address:
        server = Server(address.removesuffix("/v1/completions"))
        server.init({"store": f"file://{store}"})
        before = [serve.ask(address, prompt) for prompt in serve.PROMPTS]
        update(lambda of, delta: sent(f"file://{store}", of, tp), server, 1)
        after = [serve.ask(address, prompt) for prompt in serve.PROMPTS]
        try:
            update(lambda of, delta: sent(f"file://{store}", of, tp), server, 2)
            wrong.append("a push without shards did not fail")
        except LiveError as error:
            print(f"{name} tp {tp} over HTTP: {error.message}")
            server.resume()
        again = [serve.ask(address, prompt) for prompt in serve.PROMPTS]
    differ = [serve.differing(fresh, answers) for answers in (before, after, again)]
    print(
        f"{name} tp {tp} over HTTP: {differ[1]} of {len(serve.PROMPTS) * serve.TOKENS} tokens or log-probabilities "
        f"differ from a fresh server's ({differ[0]} before), {differ[2]} after a push that fails",
        flush=True,
    )
    return [*wrong, *(["tokens differ over HTTP"] if differ[1] or differ[2] or not differ[0] else [])]


def compare(root: Path, python: str, name: str, tp: int) -> list[str]:
    """What is wrong with one model at one degree; prints what was measured."""
    folders = [checkpoint(root, name, version) for version in (0, 1, 2)]
    store = root / "store"
    store.mkdir()
    for version, of in ((1, 1), (2, 2), (3, 1), (4, 1), (5, 1), (6, 2)):
        split(folders[of], store / str(version), tp=tp, format="vllm")
    for path in (store / "3").glob(f"model-rank-{tp - 1}-part-*"):
        path.unlink()
    fresh = {of: in_vllm(root, python, folders[of], tp, PROMPTS, TOKENS, LENGTH)["answers"] for of in (1, 2)}
    live = in_vllm(root, python, folders[0], tp, PROMPTS, TOKENS, LENGTH, store=store)
    equals = {"after-1": 1, "after-2": 2, "after-3": 2, "after-loader": 2, "after-5": 1}
    wrong = [f"{step} differs from a fresh engine" for step, of in equals.items() if live[step] != fresh[of]]
    wrong += [f"'{step}' and '{other}' are equal" for step, other in (("dummy", "after-1"), ("after-1", "after-2"))
              if live[step] == live[other]]  # fmt: skip
    wrong += [line for rank in live["loader"] for line in rank["differences"]]
    said = {version: live[f"said-{version}"] for version in (1, 2, 3, 4, 5, 6)}
    wanted = {1: "committed", 2: "committed", 3: "no shards", 4: "no memory left", 5: "committed", 6: "no memory left"}
    wrong += [f"version {version}: {said[version]}" for version, text in wanted.items() if text not in said[version]]
    wrong += [] if "refused" in live else ["a model that is half new has answered"]
    tokens = [token for answer in live["after-1"] for token in answer]
    milliseconds = " ".join(f"{live[f'milliseconds-{version}']:.0f}" for version in (1, 2, 5))
    witnesses = " ".join(f"{rank['milliseconds']:.0f}" for rank in live["loader"])
    print(
        f"{name} tp {tp}: {sum(equal(live['after-1'], fresh[1]))} of {len(tokens)} tokens equal a fresh engine's "
        f"({sum(equal(live['dummy'], fresh[1]))} before), pushes {milliseconds} ms, loader asked in {witnesses} ms; "
        f"after a failure: {live.get('refused')}", flush=True,
    )  # fmt: skip
    return wrong


def equal(one: Answer, other: Answer) -> list[bool]:
    """For each token, whether it and its log-probability are equal."""
    return [a == b for of_one, of_other in zip(one, other, strict=True)
            for a, b in zip(of_one, of_other, strict=True)]  # fmt: skip


def checkpoint(root: Path, name: str, version: int) -> Path:
    """A model in BF16, which vLLM packs on a CPU; each version with other values."""
    folder = zoo.save(
        name,
        root / f"model-{version}",
        torch.bfloat16,
        settings=SIZES | {"max_position_embeddings": 512, "vocab_size": 203},
    )
    generator = torch.Generator().manual_seed(version)
    path = folder / "model.safetensors"
    tensors = {key: draw(tensor, generator) for key, tensor in sorted(load_file(path).items())}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def draw(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Other values at the same scale."""
    noise = torch.randn(tensor.shape, generator=generator)
    scaled = noise / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 1 + 0.2 * noise
    return scaled.to(tensor.dtype)


if __name__ == "__main__":
    main()
