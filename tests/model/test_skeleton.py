"""``reshard plan`` of a config.json alone, before its weights are there: the answer is that of the weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.marks import one_of_each
from tests.support import command, refused
from tests.zoo import save


@pytest.mark.parametrize("name", one_of_each(("llama", "mixtral", "gpt_neox", "gemma2"), lambda _: "any"))
def test_as_with_the_weights(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "whole/config.json", tmp_path / "alone")
    for more in ((), ("--tp", "2"), ("--tp", "2", "--as", "vllm")):
        plans = [command("plan", place, *more, "--json", cwd=tmp_path) for place in ("whole", "alone")]
        whole, alone = (json.loads(done.stdout) for done in plans)
        for plan in (whole, alone):
            plan |= {"source": "", "rows": sorted(plan.get("rows", ()), key=str)}
        assert whole == alone
    assert command("plan", "alone/config.json", "--tp", "3", cwd=tmp_path).returncode in (0, 2)
    assert command("plan", "alone", "--tp", "2", "--report", "page.html", cwd=tmp_path).returncode == 0


def test_of_a_quantized_model_the_weights_are_needed(tmp_path: Path) -> None:
    save("llama", tmp_path / "whole")
    config = json.loads((tmp_path / "whole/config.json").read_text())
    (tmp_path / "alone").mkdir()
    quantized = config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8]}}
    (tmp_path / "alone/config.json").write_text(json.dumps(quantized))
    assert "no weights" in refused("plan", "alone", cwd=tmp_path)
