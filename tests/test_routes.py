"""Any route to a form gives the bytes of the direct one: a sample of ``tests/routes.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import thorough
from tests.routes import Walk

pytestmark = thorough


SAMPLE = {
    "plain": "tp2 vllm-2 dcp-2 megatron-legacy-2 sglang-2 pp2",
    "kv-block": "megatron-legacy-1 meta-1 torchtitan-2 torchtitan-0.2-1 megatron-1 megatron-legacy-sequential-1",
    "kv-mistral": "mistral-1 megatron-legacy-1 megatron-1 dcp-1",
    "kv-tied": "tp2 dcp-modules-2 torchtitan-1 transformers-2 vllm-2",
    "tied": "tp1 dcp-modules-2 vllm-pp2 deepspeed-universal-1",
    "packed": "tp2 vllm-2 dcp-1 pp2",
    "experts": "ep2 vllm-2 vllm-pp2 mistral-1 megatron-legacy-1 deepspeed-universal-1",
    "gpt-oss": "tp2 torchtitan-1 vllm-2 megatron-legacy-1",
    "mamba": "tp2 vllm-2 vllm-pp2 dcp-1",
    "fp8-block": "tp2 vllm-2 dcp-2",
    "fp8-tensor": "tp2 vllm-2 dcp-1",
    "fp8-channel": "tp2 vllm-2 dcp-1",
    "int4-stated": "tp2 tp4 vllm-2 dcp-2",
    "gptq": "tp2 vllm-2 dcp-1",
    "awq": "tp2 vllm-2 dcp-1",
    "bnb": "tp2 tp4 dcp-2",
    "mxfp4": "tp2 tp4 dcp-2",
}


@pytest.mark.parametrize("source", SAMPLE)
def test_every_route_gives_the_bytes_of_the_direct_one(source: str, tmp_path: Path) -> None:
    walk, forms = Walk(source, tmp_path), SAMPLE[source].split()
    routes = [route for form in forms for route in walk.direct(form)]
    routes += [route for first in forms for second in forms for route in walk.second(first, second)]
    assert [str(route) for route in routes if route.found != "same"] == []
