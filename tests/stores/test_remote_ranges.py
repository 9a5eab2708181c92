"""Checkpoints that are read where they are: on a Hub, in a bucket, on a web server, with what goes wrong on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.store import joined
from reshard.publishing import upload as uploads
from reshard.store.bucket import Bucket, StoredFile, fetch_stored
from reshard.store.hub import HubFile
from reshard.store.remote import open_store
from reshard.store.selection import Weights
from reshard.store.staging_names import staging_of
from tests.dequantize import METHODS
from tests.marks import thorough
from tests.source.test_quantized import checkpoint as quantized
from tests.stores.hub_server import hub_with
from tests.stores.store_server import StoreServer, dropped, shifted, slow, status, truncated, upload, whole
from tests.support import LLAMA, change_json, command, contents, llama_tensors, write_checkpoint, write_file
from tests.transforms.test_adapters import adapter

pytestmark = thorough

Run = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {"hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2, "vocab_size": 1024}
    return write_checkpoint(tmp_path_factory.mktemp("ranges") / "llama", files=2, config=config)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreServer]:
    (tmp_path / "bucket").mkdir()
    with StoreServer(tmp_path / "bucket") as server:
        yield server


@pytest.fixture
def run(store: StoreServer, tmp_path: Path) -> Run:
    """``reshard`` with an empty cache and the bucket's credentials."""

    def call(*arguments: str | Path, **more: str) -> CompletedProcess[str]:
        environment = store.environment | {"RESHARD_RETRY_SECONDS": "20"} | more
        return command(*arguments, "--cache-dir", tmp_path / "cache", **environment)

    return call


def weights(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(folder).items() if name.endswith(".safetensors")}


def assert_same_weights(one: Path, other: Path) -> None:
    assert weights(one) == weights(other) != {}


def assert_refused(done: CompletedProcess[str], *parts: str, out: Path) -> None:
    lines = done.stderr.splitlines()
    assert done.returncode in {1, 2} and [line.partition(":")[0] for line in lines] == ["Error", "Hint"], done.stderr
    assert all(part in lines[0] for part in parts), lines[0]
    assert not out.exists() and "secret" not in done.stderr


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_from_a_bucket_as_from_disk(kind: str, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    url = upload(checkpoint, store, "models/llama")
    url = url if kind == "s3" else f"{store.url}/bucket/models/llama"
    assert run("split", url, tmp_path / "out", "--tp", "4").returncode == 0
    held = sum(len(data) for data in weights(checkpoint).values())
    assert 0.99 * held < store.fetched() < 1.01 * held + 200_000  # each byte once, and the headers
    assert command("split", checkpoint, tmp_path / "local", "--tp", "4").returncode == 0
    assert_same_weights(tmp_path / "out", tmp_path / "local")
    assert command("merge", tmp_path / "out", tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("s3", ()), ("s3", ("--as", "vllm")), ("s3", ("--as", "transformers")), ("http", ("--as", "dcp"))],
)
def test_shards_elsewhere_are_merged(
    kind: str, form: tuple[str, ...], store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    assert command("split", checkpoint, tmp_path / "shards", "--tp", "2", *form).returncode == 0
    url = upload(tmp_path / "shards", store, "shards")
    done = run("merge", url if kind == "s3" else f"{store.url}/bucket/shards", tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "merged") == contents(checkpoint)


@pytest.mark.parametrize(
    ("form", "at"), [((), -40_000), (("--as", "vllm"), -40_000), (("--as", "dcp"), -40_000), (("--as", "dcp"), -1)]
)
def test_a_flipped_byte_in_a_bucket_is_found(
    form: tuple[str, ...], at: int, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    assert command("split", checkpoint, tmp_path / "shards", "--tp", "2", *form).returncode == 0
    shard = min(file for file in (tmp_path / "shards").rglob("*") if file.suffix in {".safetensors", ".distcp"})
    content = bytearray(shard.read_bytes())
    content[at] ^= 1
    shard.write_bytes(content)
    done = run("merge", upload(tmp_path / "shards", store, "shards"), tmp_path / "merged")
    assert_refused(done, f"s3://bucket/shards/{shard.relative_to(tmp_path / 'shards')}", out=tmp_path / "merged")


def test_one_rank_reads_little_more_than_it_holds(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    url = upload(checkpoint, store, "llama")
    assert run("split", url, tmp_path / "out", "--ep", "1", "--pp", "2", "--rank", "1").returncode == 0
    held = sum(map(len, weights(tmp_path / "out").values()))
    headers = 2 * 100_000
    assert store.fetched() <= 1.02 * held + headers  # whole layers: nothing is cut
    assert run("split", url, tmp_path / "cut", "--tp", "4", "--rank", "3").returncode == 0
    rows = 2 * 2 * 256 * (256 + 2048)  # o_proj and down_proj of two layers: each whole, as rows lie close together
    held = sum(map(len, weights(tmp_path / "cut").values()))
    assert store.fetched() <= 1.02 * (held + rows * 3 // 4) + headers


@pytest.mark.parametrize("mesh", [("--tp", "4"), ("--tp", "2", "--pp", "2")])
def test_plan_says_what_a_rank_downloads(
    mesh: tuple[str, ...], store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    url = upload(checkpoint, store, "llama")
    found = json.loads(run("plan", url, *mesh, "--json").stdout)["download_per_rank"]
    store.fetched()
    assert run("split", url, tmp_path / "out", *mesh, "--rank", "0").returncode == 0
    first = store.fetched() - 2 * 100_000 - 64 * 21
    assert run("split", url, tmp_path / "out", *mesh, "--rank", "3").returncode == 0
    last = store.fetched()
    assert abs(max(first, last) - found) < 2 * 16_000 + 2_000  # neighbours that are joined, and samples
    assert "download" in run("plan", url, *mesh).stdout
    assert "download" not in command("plan", checkpoint, *mesh).stdout


def test_planning_reads_headers_alone(store: StoreServer, run: Run, checkpoint: Path) -> None:
    assert "Valid degrees" in run("plan", upload(checkpoint, store, "llama")).stdout
    assert store.fetched() <= 2 * 100_000


def written(what: str, base: Path, folder: Path) -> None:
    """A folder of some kind, with nothing of reshard's beside it."""
    tensors = load_file(base / "model.safetensors")
    if what == "adapter":
        adapter(folder)
    elif what == "delta":
        write_checkpoint(base.with_name("changed"), seed=1, config=json.loads((base / "config.json").read_text()))
        assert command("diff", base, base.with_name("changed"), "--out", folder).returncode == 1
    elif what == "modelopt":
        settings = json.loads((quantized(folder, METHODS["modelopt-fp8"], "column and row")[0] / CONFIG).read_text())
        of_modelopt = {"producer": {"name": "modelopt"}, "quantization": settings.pop("quantization_config")}
        (folder / CONFIG).write_text(json.dumps(settings))
        (folder / "hf_quant_config.json").write_text(json.dumps(of_modelopt))
    elif what == "bin":
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        torch.save(tensors, folder / "pytorch_model.bin")
    elif what == "two bins":
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        parts = {name: f"pytorch_model-{len(name) % 2}.bin" for name in tensors}
        for part in set(parts.values()):
            torch.save({name: tensors[name] for name in tensors if parts[name] == part}, folder / part)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": parts}))
    else:
        assert command("split", base, folder, "--tp", "1", "--as", what).returncode == 0
        for file in ("reshard.json", CONFIG):
            (folder / file).unlink()


@pytest.mark.parametrize("kind", ["s3", "http"])
@pytest.mark.parametrize("what", ["adapter", "bin", "two bins", "delta", "meta", "mistral", "modelopt"])
def test_what_is_no_usual_checkpoint_is_read_elsewhere_too(
    what: str, kind: str, store: StoreServer, run: Run, tmp_path: Path
) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 32, "vocab_size": 64}
    config = LLAMA | sizes if what in {"meta", "mistral"} else LLAMA
    base = write_checkpoint(tmp_path / "base", config=config | ({"model_type": what} if what == "mistral" else {}))
    written(what, base, tmp_path / what)
    url = upload(tmp_path / what, store, "a folder")
    url = url if kind == "s3" else f"{store.url}/bucket/a folder"
    out = tmp_path / "out"
    split: tuple[str | Path, ...] = ("split", "X", out, "--tp", "2")
    commands: list[tuple[str | Path, ...]] = [("inspect", "X"), ("plan", "X"), split]
    if what == "adapter":
        commands = [("inspect", "X"), ("plan", "X", "--config", base), (*split, "--config", base)]
    elif what == "delta":
        commands = [("inspect", "X"), ("plan", "X"), ("patch", base, "X", out)]
    for words in commands:
        answers = []
        for source in (tmp_path / what, url):
            done = run(*(source if word == "X" else word for word in words))
            tensors = {file.relative_to(out): load_file(file) for file in out.rglob("*.safetensors")}
            values = {(file, *map(str, of.items())) for file, of in tensors.items()}
            answers.append((done.returncode, values, {file.relative_to(out) for file in out.rglob("*")}))
            shutil.rmtree(out, ignore_errors=True)
        assert answers[0] == answers[1], (words, done)
        assert bool(tensors) == (out in words), (words, done)


@pytest.mark.parametrize("form", ["meta", "mistral"])
def test_params_json_on_a_web_server_is_not_missing(form: str, store: StoreServer, run: Run, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "hidden_size": 32, "vocab_size": 64}
    config = LLAMA | sizes | ({"model_type": form} if form == "mistral" else {})
    base = write_checkpoint(tmp_path / "base", config=config)
    assert run("split", base, tmp_path / "out", "--tp", "1", "--as", form).returncode == 0
    upload(tmp_path / "out", store, "out")
    done = run("verify", base, f"{store.url}/bucket/out", "--exact-only")
    assert done.returncode == 0, done


def test_from_the_hub_without_a_copy(checkpoint: Path, tmp_path: Path) -> None:
    with hub_with(tmp_path, "llama", checkpoint) as hub:
        environment = hub.environment(tmp_path / "home")
        done = in_process("split", "org/llama", tmp_path / "out", "--tp", "2", environment=environment)
        assert done.returncode == 0, done.stderr
        cached = [p for p in (tmp_path / "home").rglob("*.safetensors") if not p.is_symlink()]
        assert sum(p.stat().st_blocks * 512 for p in cached) < 500_000  # headers
    assert command("split", checkpoint, tmp_path / "local", "--tp", "2").returncode == 0
    assert_same_weights(tmp_path / "out", tmp_path / "local")


def in_process(*arguments: str | Path, environment: dict[str, str]) -> CompletedProcess[str]:
    """A process of its own: the Hub's client reads its environment when it is imported."""
    line = [sys.executable, "-m", "reshard", *map(str, arguments)]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, check=False)


# --- what is written -------------------------------------------------------------------------------------------------


def test_into_a_bucket_and_back(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    done = run("split", checkpoint, "s3://bucket/shards/llama", "--tp", "2")
    assert done.returncode == 0 and "The result is s3://bucket/shards/llama" in done.stdout, done.stderr
    assert command("split", checkpoint, tmp_path / "local", "--tp", "2").returncode == 0
    assert contents(store.root / "shards" / "llama").keys() == contents(tmp_path / "local").keys()
    assert_same_weights(store.root / "shards" / "llama", tmp_path / "local")
    puts = [r.path.rpartition("/")[2] for r in store.requests if r.method == "PUT"]
    assert puts[0] == ".reshard-unfinished" and puts[1].startswith(".reshard-journal-") and puts[-1] == "reshard.json"
    assert not [path for path in (store.root / "shards" / "llama").iterdir() if path.name.startswith(".")]
    assert run("merge", "s3://bucket/shards/llama", "s3://bucket/merged").returncode == 0
    assert contents(store.root / "merged") == contents(checkpoint)
    assert not any(path.is_file() for path in (tmp_path / "cache").rglob("uploads/*"))
    assert run("inspect", "s3://bucket/shards/llama").returncode == 0


def test_what_is_in_a_bucket_is_not_overwritten(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (store.root / "mine").mkdir()
    (store.root / "mine" / "thesis.txt").write_text("precious")
    done = run("split", checkpoint, "s3://bucket/mine", "--tp", "2")
    assert done.returncode == 2 and "holds 'thesis.txt' and is not a checkpoint" in done.stderr
    assert run("split", checkpoint, "s3://bucket/shards", "--tp", "2").returncode == 0
    before = contents(store.root / "shards")
    done = run("split", checkpoint, "s3://bucket/shards", "--tp", "4")
    assert done.returncode == 2 and "s3://bucket/shards exists" in done.stderr
    assert contents(store.root / "shards") == before
    assert run("split", checkpoint, "s3://bucket/shards", "--tp", "4", "--overwrite").returncode == 0
    there = {name.partition("/")[0] for name in contents(store.root / "shards") if "/" in name}
    assert there == {f"rank-0{rank}-of-04" for rank in range(4)}
    assert run("merge", "s3://bucket/shards", tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


@pytest.mark.parametrize("form", [(), ("--as", "vllm"), ("--as", "dcp")])
def test_shards_in_a_bucket_are_verified(
    form: tuple[str, ...], store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    assert run("split", checkpoint, "s3://bucket/shards", "--tp", "2", *form).returncode == 0
    original = upload(checkpoint, store, "llama")
    done = run("verify", original, "s3://bucket/shards", "--exact-only", "-q")
    assert (done.returncode, done.stdout) == (0, "same\n"), done.stderr
    shard = min(file for file in (store.root / "shards").rglob("*") if file.suffix in {".safetensors", ".distcp"})
    content = bytearray(shard.read_bytes())
    content[-40_000] ^= 1
    shard.write_bytes(content)
    assert run("verify", original, "s3://bucket/shards", "--exact-only", "-q").returncode == 1


def test_a_stopped_upload_goes_on(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    url = "s3://bucket/shards"
    store.faults.extend([status(403)])
    failed = run("split", checkpoint, url, "--tp", "4")
    assert failed.returncode == 2 and "is refused (403)" in failed.stderr
    assert not (store.root / "shards" / "reshard.json").exists()
    done = run("inspect", url)
    assert done.returncode != 0 and "unfinished" in done.stderr + done.stdout
    there = {f"/bucket/{path.relative_to(store.root)}" for path in store.root.glob("shards/*/*.safetensors")}
    store.requests.clear()
    again = run("split", checkpoint, url, "--tp", "4")
    assert again.returncode == 0, again.stderr
    puts = {r.path for r in store.requests if r.method == "PUT" and r.path.endswith(".safetensors")}
    assert puts and not puts & there and len(puts | there) == 4
    assert run("merge", url, tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


def test_places_that_take_no_files(store: StoreServer, run: Run, checkpoint: Path) -> None:
    done = run("split", checkpoint, f"{store.url}/bucket/x", "--tp", "2")
    assert done.returncode == 2 and "which takes no files" in done.stderr
    done = run("split", checkpoint, "ftp://host/x", "--tp", "2")
    assert done.returncode == 2 and "no such kind of store" in done.stderr
    done = run("split", checkpoint, "s3://bucket/x", "--tp", "2", "--rank", "0", "--overwrite")
    assert done.returncode == 2 and "--overwrite is not possible" in done.stderr


# --- several processes -----------------------------------------------------------------------------------------------


def room_for(monkeypatch: pytest.MonkeyPatch, nbytes: int, largest: list[int]) -> None:
    """Little room to build an output in; ``largest`` gets the bytes that lie there when a file is uploaded."""
    put = Bucket.put

    def measured(self: Bucket, key: str, content: bytes | Path, task: str = "") -> str | None:
        if isinstance(content, Path) and key.endswith(".safetensors"):
            folder = next(parent for parent in content.parents if parent.name == "uploads")
            built = (path for path in folder.rglob("*.safetensors*") if path.is_file())
            largest.append(sum(path.stat().st_size for path in built))
        return put(self, key, content, task)

    monkeypatch.setattr(Bucket, "put", measured)
    monkeypatch.setattr(uploads, "ROOM", nbytes)


@pytest.mark.parametrize("form", [(), ("--as", "transformers")])
def test_a_bucket_needs_the_disk_for_a_few_files(
    form: tuple[str, ...], store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    line = ("--tp", "2", "--max-shard-size", "2MB", *form)
    assert command("split", checkpoint, tmp_path / "local", *line).returncode == 0
    sizes = {name: len(data) for name, data in weights(tmp_path / "local").items()}
    largest = list[int]()
    room_for(monkeypatch, max(sizes.values()), largest)  # one file at a time
    done = run("split", checkpoint, "s3://bucket/shards", *line)
    assert done.returncode == 0, done.stderr
    assert contents(store.root / "shards") == contents(tmp_path / "local")
    assert largest and max(largest) <= max(sizes.values()) < sum(sizes.values())
    assert not [path for path in (tmp_path / "cache").rglob("*.safetensors") if "uploads" in str(path)]


@pytest.mark.parametrize(("how", "bare"), [("--rank", False), ("--part", False), ("--part", True)])
def test_processes_share_a_place_in_a_bucket(
    how: str, bare: bool, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    store.lists_bare_etags = bare
    url, line = "s3://bucket/shards", ("--tp", "2", "--max-shard-size", "2MB")
    assert command("split", checkpoint, tmp_path / "local", *line).returncode == 0

    def process(index: int) -> CompletedProcess[str]:
        return run("split", checkpoint, url, *line, how, "auto", RANK=str(index), WORLD_SIZE="2")

    first = process(1)
    assert first.returncode == 0 and "The result is" not in first.stdout, first.stderr
    assert not (store.root / "shards" / "reshard.json").exists()
    label = "rank-1-of-2" if how == "--rank" else "part-1-of-2"
    assert label in run("inspect", url).stderr
    last = process(0)
    assert last.returncode == 0 and "The result is s3://bucket/shards" in last.stdout, last.stderr
    assert contents(store.root / "shards") == contents(tmp_path / "local")
    before = {path: path.stat().st_mtime_ns for path in (store.root / "shards").rglob("*")}
    late = process(1)
    assert late.returncode == 0 and "is left to write for this process" in late.stdout, late.stdout + late.stderr
    assert run("merge", url, tmp_path / "merged").returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in (store.root / "shards").rglob("*")}


def test_a_merge_in_parts_into_a_bucket(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    assert command("split", checkpoint, tmp_path / "shards", "--tp", "2").returncode == 0
    for index in (0, 1, 0):
        done = run("merge", tmp_path / "shards", "s3://bucket/merged", "--part", f"{index}/2")
        assert done.returncode == 0, done.stderr
    assert "None of the files is left" in done.stdout
    assert contents(store.root / "merged") == contents(checkpoint)


def test_two_that_find_all_files_there(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("split", checkpoint, "s3://bucket/shards", "--tp", "2", "--max-shard-size", "2MB", "--part")
    before, said = uploads.Uploading.is_last, list[str]()

    def later(self: uploads.Uploading) -> bool:
        monkeypatch.undo()
        said.append(run(*line, "0/2").stdout)
        return before(self)

    monkeypatch.setattr(uploads.Uploading, "is_last", later)
    done = run(*line, "1/2")
    assert done.returncode == 0 and "The result is" in said[0] and "None of the files is left" in done.stdout
    assert command("split", *line[1:2], tmp_path / "local", *line[3:-1]).returncode == 0
    assert contents(store.root / "shards") == contents(tmp_path / "local")
    assert not list((tmp_path / "cache").rglob("uploads/*"))


def test_what_another_task_has_uploaded_is_not_taken(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(
        tmp_path / "other", files=2, seed=5, config=json.loads((checkpoint / "config.json").read_text())
    )
    assert run("split", other, "s3://bucket/shards", "--tp", "2", "--part", "0/2").returncode == 0
    for part in (["--part", "1/2"], []):
        done = run("split", checkpoint, "s3://bucket/shards", "--tp", "2", *part)
        assert done.returncode == 2 and "holds the unfinished output of another command" in done.stderr
    shutil.rmtree(store.root / "shards")  # as the hint says
    done = run("split", checkpoint, "s3://bucket/shards", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert command("split", checkpoint, tmp_path / "local", "--tp", "2").returncode == 0
    assert contents(store.root / "shards") == contents(tmp_path / "local")


def test_another_machine_goes_on_with_what_is_in_the_bucket(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    line = ("split", checkpoint, "s3://bucket/shards", "--tp", "2", "--max-shard-size", "2MB")
    assert run(*line, "--part", "0/2").returncode == 0
    there = {f"/bucket/{path.relative_to(store.root)}" for path in store.root.glob("shards/*/*.safetensors")}
    shutil.rmtree(tmp_path / "cache")
    replaced = min(store.root.glob("shards/*/*.safetensors"))
    replaced.write_bytes(b"of another")
    store.requests.clear()
    done = run(*line)
    assert done.returncode == 0, done.stderr
    puts = {r.path for r in store.requests if r.method == "PUT" and r.path.endswith(".safetensors")}
    assert puts & there == {f"/bucket/{replaced.relative_to(store.root)}"}
    assert run("merge", "s3://bucket/shards", tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


def test_the_password_of_a_url_is_sent(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    upload(checkpoint, store, "llama")
    store.authorization = f"Basic {b64encode(b'me:p@ss word').decode()}"
    with_password = f"{store.url.replace('//', '//me:p%40ss%20word@')}/bucket/llama"
    done = run("split", with_password, tmp_path / "out", "--tp", "2")
    assert done.returncode == 0 and "ss%20word" not in done.stdout + done.stderr, done.stderr
    assert run("split", f"{store.url}/bucket/llama", tmp_path / "other", "--tp", "2").returncode == 2


# --- what goes wrong -------------------------------------------------------------------------------------------------

PASSING = {
    "dropped": [dropped],
    "429": [status(429), status(429)],
    "503": [status(503), status(503)],
    "truncated": [truncated],
    "slow": [slow],
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_passes(fault: str, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    url = upload(checkpoint, store, "llama")
    assert run("plan", url).returncode == 0
    store.faults.extend(PASSING[fault])
    done = run("split", url, tmp_path / "out", "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert not store.faults
    assert "tried again" in done.stdout or fault == "slow"
    assert command("merge", tmp_path / "out", tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (status(503), "trying again did not help"),
        (status(403), "refused (403)"),
        (status(401), "refused (401)"),
        (status(404), "is not there (404)"),
        (whole, "does not send parts of files"),
        (shifted, "llama/model-0000"),
    ],
)
def test_a_fault_that_stays(
    fault: Callable[[Any], bool], says: str, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    store.always = fault
    done = run("split", upload(checkpoint, store, "llama"), tmp_path / "out", "--tp", "2", RESHARD_RETRY_SECONDS="1")
    assert_refused(done, says, "s3://bucket/llama", out=tmp_path / "out")


def test_a_fault_on_the_way_leaves_what_is_complete(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    url, out = upload(checkpoint, store, "llama"), tmp_path / "out"
    first = run("split", url, out, "--tp", "2", "--rank", "0")
    store.always = status(500)
    failed = run("split", url, out, "--tp", "2", "--rank", "1", RESHARD_RETRY_SECONDS="1")
    assert first.returncode == 0 and failed.returncode == 2 and "trying again did not help" in failed.stderr
    store.always = None
    assert run("split", url, out, "--tp", "2", "--rank", "1").returncode == 0
    assert command("merge", out, tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


def test_ctrl_c_ends_at_once(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    url, out = upload(checkpoint, store, "llama"), tmp_path / "out"
    assert run("split", url, tmp_path / "other", "--tp", "2").returncode == 0
    asked = threading.Event()

    def stuck(_: Any) -> bool:
        asked.set()
        time.sleep(60)
        return True

    store.always = stuck
    line = [sys.executable, "-m", "reshard", "split", url, out, "--tp", "2", "--cache-dir", tmp_path / "cache"]
    process = subprocess.Popen(line, env=os.environ | store.environment, stderr=subprocess.PIPE, text=True)
    assert asked.wait(60)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and time.monotonic() - begun < 30, said
    assert said.startswith("reshard: interrupted: nothing is kept\n")
    assert not out.exists() and not staging_of(out).exists()
    store.always = None
    assert run("split", url, out, "--tp", "2").returncode == 0


def test_an_object_that_is_replaced_midway_is_never_mixed(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    url = upload(checkpoint, store, "llama")

    def replace(_: Any) -> bool:
        shard = store.root / "llama" / "model-00002-of-00002.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        (new := shard.with_name(f"{shard.name}.new")).write_bytes(content)
        new.rename(shard)  # or another request could find an empty object
        return False

    assert run("plan", url).returncode == 0
    store.faults.extend([lambda _: False] * 4 + [replace])
    done = run("split", url, tmp_path / "out", "--tp", "2")
    assert_refused(done, "model-00002-of-00002.safetensors was replaced", out=tmp_path / "out")


def test_ranks_of_two_states_of_an_object_are_not_mixed(
    store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    url = upload(checkpoint, store, "llama")
    assert run("split", url, tmp_path / "out", "--tp", "2", "--rank", "0").returncode == 0
    shard = store.root / "llama" / "model-00002-of-00002.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    done = run("split", url, tmp_path / "out", "--tp", "2", "--rank", "1")
    assert done.returncode == 2 and "is not the file that the ranks in" in done.stderr


def test_requester_pays(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    url = upload(checkpoint, store, "llama")
    store.requester_pays = True
    done = run("split", url, tmp_path / "out", "--tp", "2")
    assert_refused(done, "access to s3://bucket/llama is refused (403)", out=tmp_path / "out")
    assert "AWS_REQUEST_PAYER" in done.stderr
    assert run("split", url, tmp_path / "out", "--tp", "2", AWS_REQUEST_PAYER="true").returncode == 0


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_errors_name_what_the_user_named(
    kind: str, store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    upload(checkpoint, store, "llama")
    url = "s3://bucket/llama" if kind == "s3" else f"{store.url}/bucket/llama"
    index = store.root / "llama" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = 1
    index.write_text(json.dumps(document))
    done = run("split", url, tmp_path / "out", "--tp", "2")
    assert_refused(done, f"{url}/model", out=tmp_path / "out")
    assert "cache" not in done.stderr
    config = store.root / "llama" / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"no-such-model"'))
    shutil.copyfile(checkpoint / index.name, index)
    done = run("split", url, tmp_path / "out", "--tp", "2")
    assert_refused(done, "no-such-model", out=tmp_path / "out")
    assert "cache" not in done.stderr
    (store.root / "llama" / "model-00002-of-00002.safetensors").write_bytes(b"")
    said = run("inspect", url, RESHARD_RETRY_SECONDS="0.5")
    assert said.returncode != 0 and "cache" not in said.stdout + said.stderr, said.stdout + said.stderr


def test_custom_code_behind_a_url_comes_along(store: StoreServer, run: Run, checkpoint: Path, tmp_path: Path) -> None:
    upload(checkpoint, store, "llama")
    folder = store.root / "llama"
    change_json(
        folder / "config.json",
        auto_map={"AutoModel": "modeling_own.Own", "AutoConfig": ["configuration_own.OwnConfig", None]},
    )
    tokenizer = {"vocab_file": "own.model", "merges_file": None, "extra_file": "../config.json"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    for name in ("modeling_own.py", "configuration_own.py", "own.model"):
        (folder / name).write_text("raise SystemExit\n")
    assert run("split", f"{store.url}/bucket/llama", tmp_path / "out", "--tp", "2").returncode == 0
    own = {path.name for pattern in ("*.py", "own.*") for path in (tmp_path / "out").glob(pattern)}
    assert own == {"modeling_own.py", "configuration_own.py", "own.model"}


def test_a_profile_without_what_reads_profiles(
    store: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3.session", None)
    environment = {name: value for name, value in store.environment.items() if "KEY" not in name}
    done = command("split", "s3://bucket/llama", tmp_path / "out", "--tp", "2", AWS_PROFILE="work", **environment)
    assert_refused(done, "AWS_PROFILE is work, and boto3", out=tmp_path / "out")


def test_what_is_not_there(store: StoreServer, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert_refused(run("split", "s3://bucket/nothing", out, "--tp", "2"), "holds no checkpoint", out=out)
    assert_refused(run("split", "s3://other/nothing", out, "--tp", "2"), "there is no bucket s3://other", out=out)
    assert_refused(run("split", f"{store.url}/bucket/nothing", out, "--tp", "2"), "holds no checkpoint", out=out)


def test_tensors_and_files_without_a_byte(run: Run, store: StoreServer, tmp_path: Path) -> None:
    source, rules = write_checkpoint(tmp_path / "source"), tmp_path / "rules.toml"
    assert command("plan", source, "--save", rules).returncode == 0
    rules.write_text(f'{rules.read_text()}\n"none" = "none hidden"\n')
    write_file(
        source / "model.safetensors", [*llama_tensors(LLAMA, "BF16"), ("none", "BF16", (0, LLAMA["hidden_size"]))]
    )
    out = tmp_path / "out"
    done = run("split", upload(source, store, "empty"), out, "--tp", "2", "--plan", rules)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(out)
    (source / "model.safetensors").write_bytes(b"")
    assert_refused(run("plan", upload(source, store, "none")), "model.safetensors", out=out)


def test_an_index_names_a_file_that_is_not_there(run: Run, store: StoreServer, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", files=2)
    (source / "model-00002-of-00002.safetensors").unlink()
    out, url = tmp_path / "out", upload(source, store, "half")
    assert_refused(run("split", url, out, "--tp", "2"), "model-00002-of-00002.safetensors", "does not exist", out=out)
    assert run("inspect", url).returncode == 1
    with hub_with(tmp_path, "half", source) as hub:
        for more in ((), ("--download",)):
            environment = hub.environment(tmp_path / "home")
            done = in_process("split", "org/half", out, "--tp", "2", *more, environment=environment)
            assert done.returncode == 2 and "does not exist" in done.stderr, done.stderr


def test_what_is_kept_is_read_again_where_it_lacks_a_file(run: Run, store: StoreServer, tmp_path: Path) -> None:
    url = upload(write_checkpoint(tmp_path / "source", files=2), store, "llama")
    assert run("plan", url).returncode == 0
    (kept,) = (tmp_path / "cache").rglob("kept.json")
    kept.unlink()
    assert run("plan", url).returncode == 0
    before = len(store.requests)
    assert run("plan", url).returncode == 0 and not any(each.range for each in store.requests[before:])


def test_files_that_are_complete_are_not_downloaded_twice(
    store: StoreServer, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    url, arguments = upload(checkpoint, store, "llama"), (Weights.FILES, tmp_path / "cache")

    def replace(_: object) -> bool:
        """Another file is there when its bytes are sent, as when it was listed."""
        for file in (store.root / "llama").glob("*.safetensors"):
            file.write_bytes(b"new" + file.read_bytes())
        return False

    store.faults.append(replace)
    with pytest.raises(MismatchError, match="was replaced while it was read"):
        fetch_stored(url, Weights.FILES, tmp_path / "another cache")
    shutil.copytree(checkpoint, store.root / "llama", dirs_exist_ok=True)
    store.faults.extend([lambda _: False, status(403)])
    with pytest.raises(CheckpointError, match="is refused"):
        fetch_stored(url, *arguments)
    assert not list((tmp_path / "cache").rglob("*/*.*/*.safetensors"))
    store.requests.clear()
    assert contents(Path(str(fetch_stored(url, *arguments).folder))) == contents(checkpoint)
    again = [each.path for each in store.requests if each.method == "GET"]
    assert len([path for path in again if path.endswith(".safetensors")]) == 1
    assert not [path for path in again if path.endswith("config.json")]


SEVERAL = """
import sys
from reshard.__main__ import main
from reshard.move import jobs

jobs.DEFAULT = jobs.Sizes(step=1 << 20, small=1000)
sys.argv[0] = "reshard"
main()
"""
"""``reshard`` with so many steps that several threads share them."""


# who reads does not know who writes
@pytest.mark.parametrize(("where", "more"), [("s3", ()), ("http", ("--as", "vllm")), ("hub", ("--as", "dcp"))])
def test_several_threads_read_elsewhere(
    where: str, more: tuple[str, ...], checkpoint: Path, store: StoreServer, tmp_path: Path
) -> None:
    with hub_with(tmp_path, "llama", checkpoint) as hub:
        upload(checkpoint, store, "llama")
        source = {"s3": "s3://bucket/llama", "http": f"{store.url}/bucket/llama", "hub": "org/llama"}[where]
        environment = {**os.environ, **store.environment, **hub.environment(tmp_path / "home")}
        line = ["split", source, tmp_path / "out", "--tp", "2", "--workers", "3", *more]
        line += ["--cache-dir", tmp_path / "cache"] if where != "hub" else []
        done = subprocess.run(
            [sys.executable, "-c", SEVERAL, *map(str, line)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        asked = [r.path for r in hub.requests if r.method == "HEAD" and r.path.endswith(".safetensors")]
        assert len(asked) == len({*asked}) == 2 * (where == "hub")  # no thread asks again where a file lies
    assert command("split", checkpoint, tmp_path / "local", "--tp", "2", *more).returncode == 0
    one, other = ({name: data for name, data in contents(tmp_path / out).items() if name != "reshard.json"}
                  for out in ("out", "local"))  # fmt: skip
    assert one == other


def test_an_expired_address_of_the_hub_is_asked_for_again(checkpoint: Path, tmp_path: Path) -> None:
    with hub_with(tmp_path, "llama", checkpoint) as hub:
        hub.expires_after, hub.busy = 5, 2
        environment = hub.environment(tmp_path / "home")
        done = in_process("split", "org/llama", tmp_path / "out", "--tp", "2", environment=environment)
        assert done.returncode == 0, done.stderr
        assert hub.expired > 0 and not hub.busy and "tried again" in done.stdout
    assert command("merge", tmp_path / "out", tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(checkpoint)


def test_a_hub_that_is_lost_while_weights_are_read_is_one_line(checkpoint: Path, tmp_path: Path) -> None:
    with hub_with(tmp_path, "llama", checkpoint) as hub:
        hub.expires_after, hub.busy = 14, 1 << 20  # the headers and samples come
        environment = {**hub.environment(tmp_path / "home"), "RESHARD_RETRY_SECONDS": "0.1"}
        line = [sys.executable, "-c", SEVERAL, "split", "org/llama", str(tmp_path / "out"), "--tp", "2"]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
    assert_refused(done, "the connection to the Hub", out=tmp_path / "out")


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e30", "-5", "soon"])
def test_what_is_no_number_of_seconds_is_refused(seconds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESHARD_RETRY_SECONDS", seconds)
    with pytest.raises(
        CheckpointError, match=f"RESHARD_RETRY_SECONDS is '{seconds}', which is not a number of seconds"
    ):
        open_store("s3://bucket/x")


def test_no_secret_is_shown() -> None:
    stored = StoredFile(Bucket("https://user:word@host/folder?X-Signature=secret"), "a.safetensors", 8, None, "now")
    on_hub = HubFile("org/name", "a.safetensors", "main", 8, "etag", "secret")
    assert stored.address == "https://host/folder/a.safetensors"
    assert "secret" not in f"{stored!r} {stored.address} {on_hub!r} {on_hub.address}" and "word" not in repr(stored)


# --- requests --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 30)), min_size=1, max_size=20), st.integers(0, 20))
def test_joined_ranges_cover_all_and_bridge_no_more_than_the_gap(parts: list[tuple[int, int]], gap: int) -> None:
    ranges = [(begin, begin + length) for begin, length in parts]
    wanted = {index for begin, end in ranges for index in range(begin, end)}
    found = list(joined(ranges, gap))
    held = [index for begin, end in found for index in range(begin, end)]
    assert len(held) == len(set(held)) and wanted <= set(held)
    assert all(after - end > gap for (_, end), (after, _) in pairwise(found))
    extra = sorted(set(held) - wanted)
    assert all(any(index - back in wanted for back in range(1, gap + 1)) for index in extra)
