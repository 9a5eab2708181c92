"""The bytes of checkpoints that lie elsewhere are compared where they lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from reshard.api import split
from reshard.system import Share
from reshard.verify.bytes import reading
from tests import store as made
from tests.marks import thorough
from tests.stores.hub_server import hub_with
from tests.stores.store_server import StoreServer, dropped, status, upload
from tests.stores.test_remote_ranges import in_process
from tests.support import change_tensor, command

pytestmark = thorough


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        yield server


def verify(bucket: StoreServer, *arguments: str | Path, **more: str) -> CompletedProcess[str]:
    environment = bucket.environment | {"RESHARD_RETRY_SECONDS": "5"} | more
    return command("verify", *arguments, "--exact-only", "--cache-dir", bucket.root.parent / "cache", **environment)


def weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def on_disk(folder: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("form", [None, "vllm", "transformers"])
@pytest.mark.parametrize("where", ["original", "shards", "both"])
def test_each_byte_is_fetched_once_and_none_is_kept(
    form: str | None, where: str, bucket: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK", 50_001)
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=4, format=form)
    one = upload(original, bucket, "llama") if where != "shards" else original
    other = upload(shards, bucket, "shards") if where != "original" else shards
    done = verify(bucket, one, other)
    assert done.returncode == 0, done.stderr
    blocks = [(request.path, request.range) for request in bucket.requests if request.range]
    assert len(blocks) == len({*blocks})
    held = (weights(original) if where != "shards" else 0) + (weights(shards) if where != "original" else 0)
    headers = 100_000 * sum(1 for folder in bucket.root.iterdir() for _ in folder.rglob("*.safetensors"))
    assert held <= bucket.fetched() <= held + headers + (1 << 16)  # samples for the fingerprint
    (bucket.root.parent / "cache").mkdir(exist_ok=True)
    assert on_disk(bucket.root.parent / "cache") <= 2 * headers


def test_little_is_fetched_twice_where_little_is_kept(
    bucket: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are taken of what is compared, and not of all of a tensor before."""
    monkeypatch.setattr(reading, "BLOCK", 5_001)
    monkeypatch.setattr(reading, "ROOM", 64 * 5_001)
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2, format="vllm")
    done = verify(bucket, upload(original, bucket, "llama"), upload(shards, bucket, "shards"))
    assert done.returncode == 0, done.stderr
    blocks = [(request.path, request.range) for request in bucket.requests if request.range]
    assert len(blocks) <= 1.5 * len({*blocks})


@pytest.mark.parametrize("form", [None, "vllm"])
def test_a_wrong_byte_is_told_by_the_names_that_were_given(
    form: str | None, bucket: StoreServer, tmp_path: Path
) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2, format=form)
    changed = sorted(shards.rglob("*.safetensors"))[-1]
    change_tensor(changed, "model.layers.1.mlp.down_proj.weight")
    done = verify(bucket, upload(original, bucket, "llama"), upload(shards, bucket, "shards"), "--json")
    assert done.returncode == 1
    first = json.loads(done.stdout)["exact"]["first"]
    assert first["file"] == f"s3://bucket/shards/{changed.relative_to(shards)}"
    assert first["original_file"] == "s3://bucket/llama/model.safetensors"
    assert str(tmp_path / "cache") not in done.stdout


def test_what_is_run_is_told_by_the_names_that_were_given(bucket: StoreServer, tmp_path: Path) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2)
    (shards / "rank-01-of-02" / "junk.bin").write_bytes(b"x")
    change_tensor(shards / "rank-00-of-02" / "model.safetensors", "model.layers.1.mlp.down_proj.weight")
    places = upload(original, bucket, "llama"), upload(shards, bucket, "shards")
    cache = tmp_path / "cache"
    done = command("verify", *places, "--json", "--seq", "8", "--cache-dir", cache, **bucket.environment)
    exact = json.loads(done.stdout)["exact"]
    assert done.returncode == 1 and exact["extra"] == ["rank-01-of-02/junk.bin"], done.stdout
    assert exact["first"]["file"] == "s3://bucket/shards/rank-00-of-02/model.safetensors"
    assert str(cache) not in done.stdout + done.stderr


def test_a_file_with_another_sum_is_fetched_again_and_told(bucket: StoreServer, tmp_path: Path) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2)
    document = json.loads((shards / "reshard.json").read_text())
    (first, second) = (rank["files"][1] for rank in document["ranks"])
    first["checksum"] = second["checksum"]
    (shards / "reshard.json").write_text(json.dumps(document, indent=2) + "\n")
    done = verify(bucket, original, upload(shards, bucket, "shards"))
    told = "the checksum of s3://bucket/shards/rank-00-of-02/model.safetensors is"
    assert done.returncode == 1 and told in done.stdout, done.stdout
    assert bucket.fetched() <= 2 * weights(shards)


@pytest.mark.parametrize("form", [None, "vllm"])
def test_what_is_extra_on_disk_is_extra_elsewhere(form: str | None, bucket: StoreServer, tmp_path: Path) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2, format=form)
    rank = "" if form else "rank-01-of-02/"
    extra = [f"{rank}junk.bin", "big.gguf", "a/b/c/d.pt", "rank-07-of-02/x.txt", ".reshard-x", ".git/pack.bin"]
    for name in extra:
        (shards / name).parent.mkdir(parents=True, exist_ok=True)
        (shards / name).write_bytes(b"x")
    url = upload(shards, bucket, "shards")
    here, there = (verify(bucket, original, folder, "--json") for folder in (shards, url))
    found = json.loads(there.stdout)["exact"]
    assert {*found["extra"]} == {f"{rank}junk.bin", "big.gguf", "a/", "rank-07-of-02", ".reshard-x"}
    assert found["extra"] == json.loads(here.stdout)["exact"]["extra"]
    assert (there.returncode, found["problems"], found["missing"]) == (1, [], [])


@pytest.mark.parametrize("form", [None, "vllm"])
def test_a_web_server_lists_nothing_and_the_answer_says_so(
    form: str | None, bucket: StoreServer, tmp_path: Path
) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2, format=form)
    (shards / "big.gguf").write_bytes(b"x")
    upload(shards, bucket, "shards")
    page = tmp_path / "page.html"
    done = verify(bucket, original, f"{bucket.url}/bucket/shards", "--report", page)
    assert done.returncode == 0 and "nothing extra" not in done.stdout, done.stderr
    assert all("extra files were not looked for" in text for text in (done.stdout, page.read_text()))


def test_faults_on_the_way(bucket: StoreServer, tmp_path: Path) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2)
    url = upload(shards, bucket, "shards")
    bucket.faults.extend([dropped, status(503)])
    assert verify(bucket, original, url).returncode == 0
    count = len(bucket.requests)

    def replaced(_: Any) -> bool:
        if len(bucket.requests) > count + 8:
            bucket.always = None
            change_tensor(bucket.root / "shards/rank-01-of-02/model.safetensors", "model.norm.weight")
        return False

    bucket.always = replaced
    shutil.rmtree(bucket.root.parent / "cache")
    done = verify(bucket, original, url)
    assert done.returncode == 2 and "was replaced while it was read" in done.stderr, done.stderr


def test_shards_on_the_hub(tmp_path: Path) -> None:
    original, shards = made.checkpoint("llama"), tmp_path / "shards"
    split(original, shards, tp=2)
    (shards / "big.gguf").write_bytes(b"x")
    with hub_with(tmp_path, "shards", shards) as hub:
        environment = hub.environment(tmp_path / "home")
        done = in_process("verify", original, "org/shards", "--exact-only", "--json", environment=environment)
    found = json.loads(done.stdout)["exact"]
    assert found.pop("extra") == ["big.gguf"], done.stderr
    assert found["nbytes"] and not any(found[key] for key in ("first", "missing", "configs", "problems"))
    assert on_disk(tmp_path / "home") <= 200_000


def test_what_several_processes_wrote_has_nothing_extra(tmp_path: Path) -> None:
    original, out = made.checkpoint("llama"), tmp_path / "out"
    for index in (0, 1):
        split(original, out, tp=2, part=Share(index, 2))
    done = command("verify", original, out, "--exact-only", "-q")
    assert done.stdout == "same\n", done.stdout
