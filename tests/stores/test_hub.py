"""The real client of the Hub against a small Hub of our own: what is fetched, what is not, what is said when it fails.

Each fetch runs in a process of its own, because the client reads its environment when it is imported.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.formats.errors import CheckpointError
from reshard.formats.files.safetensors import read_header
from reshard.formats.files.side_files import LARGEST
from reshard.formats.store import FilePath
from reshard.source.opening import find
from reshard.store.hub import fetch
from reshard.store.selection import HubAccess, Weights, side_files, weight_files
from tests.forked import forked
from tests.formats.test_checkpoint import SIDE_FILES, STRAYS
from tests.marks import of_ranks, thorough
from tests.stores.hub_server import HubServer
from tests.transforms.test_adapters import adapter

pytestmark = [thorough, of_ranks]

REPO = "org/tiny"
ROOT = Path(__file__).parents[2]
IMPATIENT = "import time; time.sleep = lambda _: None\n"  # for retries, of which there are as many
BRIEF = {"RESHARD_RETRY_SECONDS": "1"}


def tensors(seed: int, count: int = 4) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {f"layer.{i}.weight": generator.standard_normal((64, 96), dtype=np.float32) for i in range(count)}


def write_repository(folder: Path, seed: int = 0) -> Path:
    """Two shards with an index, and around them what must stay where it is."""
    folder.mkdir(parents=True)
    weight_map = {}
    for part in (1, 2):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file(part_tensors := {f"{part}.{k}": v for k, v in tensors(seed + part).items()}, folder / file)
        weight_map |= dict.fromkeys(part_tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "seed": seed}))
    (folder / "hf_quant_config.json").write_text('{"quantization": {}}')
    (folder / "tokenizer.json").write_text("{}")
    for unwanted in ("pytorch_model.bin", "consolidated.safetensors", "tiny.Q4_0.gguf", "logo.PNG", ".gitattributes"):
        (folder / unwanted).write_bytes(b"not to be fetched")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"not to be fetched")
    (folder / "original" / "params.json").write_text("{}")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    return folder


WANTED = {
    "config.json",
    "logo.PNG",
    "hf_quant_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
}
SHARDS = sorted(name for name in WANTED if name.endswith(".safetensors"))


@dataclass(frozen=True)
class Answer:
    got: dict[str, Any]
    stderr: str

    @property
    def path(self) -> Path:
        assert "path" in self.got, self.got
        return Path(self.got["path"])

    @property
    def error(self) -> str:
        """Message and hint, each of which must be one line."""
        message, hint = self.got["message"], self.got["hint"]
        assert message and hint and "\n" not in message + hint
        assert "Traceback" not in self.stderr
        return f"{message} | {hint}"


Client = Callable[..., Answer]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    write_repository(tmp_path / "hub" / REPO)
    with HubServer(tmp_path / "hub") as server:
        yield server


def _fetch(arguments: dict[str, Any], before: str, limit: int) -> None:
    """Fetch, and print what came of it, in a process whose environment the client reads as it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    exec(before, {})
    try:
        weights = arguments.pop("weights", Weights.FILES)
        got = find(arguments.pop("source"), HubAccess(**arguments), weights)
    except CheckpointError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}))
    else:
        print(json.dumps(_answer(got)))


def _answer(got: FilePath) -> dict[str, Any]:
    """What was found: its folder here, its name, and the headers of the files that are not in it."""
    if isinstance(got, Path):
        return {"path": str(got), "repo": None}
    elsewhere = [got / name for name in got.store.stats if got.store.local(name) is None]
    headers = {file.name: [file.stat().st_size, read_header(file).raw.hex()] for file in elsewhere}
    return {"path": str(got.store.folder), "repo": str(got), "commit": got.store.commit, "headers": headers}


@pytest.fixture
def client(hub: HubServer, tmp_path: Path, fork_server: None) -> Client:
    """``fetch`` in a process of its own, whose Hub is ``hub``."""

    def run(
        source: str = REPO, *, env: dict[str, str] | None = None, before: str = "", limit: int = -1, **arguments: object
    ) -> Answer:
        work = partial(_fetch, {"source": source, **arguments}, before, limit)
        (done,) = forked([(work, hub.environment(tmp_path / "home", **(env or {})))], tmp_path)
        assert done.returncode == 0, done.stderr
        return Answer(json.loads(done.stdout), done.stderr)

    return run


def names(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}


def same_files(folder: Path, repository: Path) -> bool:
    return all((folder / name).read_bytes() == (repository / name).read_bytes() for name in names(folder))


# --- what is fetched -----------------------------------------------------------------------------------------------


def test_fetches_what_is_needed_and_nothing_twice(hub: HubServer, client: Client, tmp_path: Path) -> None:
    first = client()
    assert first.got["repo"] == REPO and first.got["commit"] == hub.commit(REPO, "main")
    assert names(first.path) == WANTED and same_files(first.path, hub.root / REPO)
    assert sorted(hub.downloads()) == sorted(WANTED)
    assert first.path.is_relative_to(tmp_path / "home")
    assert "downloading 2 files of org/tiny" in first.stderr and "%|" not in first.stderr

    hub.requests.clear()
    second = client(quiet=True)
    assert second.got == first.got and hub.downloads() == [] and second.stderr == ""


def test_quiet_prints_nothing(client: Client) -> None:
    assert client(quiet=True).stderr == ""


def test_revision_is_a_branch_or_a_commit(hub: HubServer, client: Client, tmp_path: Path) -> None:
    hub.revisions["v2/draft"] = tmp_path / "other"
    write_repository(tmp_path / "other" / REPO, seed=7)
    branch = client(revision="v2/draft")
    assert branch.got["commit"] == hub.commit(REPO, "v2/draft") and same_files(branch.path, tmp_path / "other" / REPO)
    assert same_files(client().path, hub.root / REPO)
    assert client(revision=branch.got["commit"]).got == branch.got
    assert client(revision="v2/draft", env={"HF_HUB_OFFLINE": "1"}).got == branch.got


def test_cache_dir(client: Client, tmp_path: Path) -> None:
    got = client(cache_dir=tmp_path / "elsewhere")
    assert got.path.is_relative_to(tmp_path / "elsewhere") and names(got.path) == WANTED
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_without_safetensors_the_bin_files_are_fetched(hub: HubServer, client: Client) -> None:
    repository = hub.root / "org" / "old"
    repository.mkdir()
    for name in ("config.json", "pytorch_model.bin", "training_args.bin", "optimizer.pt", "tf_model.h5"):
        (repository / name).write_bytes(b"{}")
    assert names(client("org/old").path) == {"config.json", "pytorch_model.bin"}


def test_repository_without_weights_is_refused_before_any_is_fetched(hub: HubServer, client: Client) -> None:
    (hub.root / "org" / "empty").mkdir()
    (hub.root / "org" / "empty" / "README.md").write_text("nothing here")
    (hub.root / "org" / "empty" / "weights.gguf").write_bytes(b"not to be fetched")
    assert "org/empty is GGUF, the format of llama.cpp (weights.gguf)" in client("org/empty").error
    assert "weights.gguf" not in hub.downloads()
    (hub.root / "org" / "empty" / "weights.gguf").unlink()
    assert "org/empty holds no checkpoint" in client("org/empty").error


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("adapter_model.bin", "a PEFT adapter"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json is missing"),
    ],
)
def test_what_is_no_checkpoint_is_not_downloaded(hub: HubServer, client: Client, name: str, what: str) -> None:
    (hub.root / "org" / "part").mkdir()
    for file in (name, "adapter_config.json" if "adapter" in name else "config.json"):
        (hub.root / "org" / "part" / file).write_text("{}")
    assert what in client("org/part").error
    assert name not in hub.downloads()


def test_an_adapter_is_fetched_without_the_states_of_its_training(hub: HubServer, client: Client) -> None:
    repository = adapter(hub.root / "org" / "lora")
    for name in ("optimizer.pt", "checkpoint-1/adapter_model.safetensors"):
        (repository / name).parent.mkdir(exist_ok=True)
        (repository / name).write_bytes(b"not to be fetched")
    assert names(client("org/lora", weights=Weights.FILES).path) == {
        "adapter_config.json", "adapter_model.safetensors", "README.md",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("listing", "wanted"),
    [
        (["model.safetensors", "model.fp32.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["weights.safetensors", "pytorch_model.bin"], ["weights.safetensors"]),
        (
            ["pytorch_model-1.bin", "pytorch_model-2.bin", "scheduler.bin"],
            ["pytorch_model-1.bin", "pytorch_model-2.bin"],
        ),
        (["unet/model.safetensors", "original/model.safetensors"], []),
        (
            ["reshard.json", "rank-00-of-02/model.safetensors", "rank-01-of-02/model.safetensors"],
            ["rank-00-of-02/model.safetensors", "rank-01-of-02/model.safetensors"],
        ),
    ],
)
def test_choice_of_weights(tmp_path: Path, listing: list[str], wanted: list[str]) -> None:
    assert weight_files(listing, tmp_path) == wanted


def chosen(names: Iterable[str], documents: Mapping[str, object]) -> list[str]:
    return side_files(dict.fromkeys(names, 1), lambda name: json.dumps(documents.get(name)).encode())


def test_side_files_of_shards_are_all_that_the_manifest_lists() -> None:
    kept = ["1_Pooling/config.json", "a.dat", "figure.png", "latest", "rank-00-of-01/config.json", "reshard.json"]
    records = [{"name": name} for name in ("1_Pooling/config.json", "a.dat")]
    manifest = {"ranks": [{"files": [{"name": "rank-00-of-01/model.safetensors"}]}], "side_files": records}
    files = [*kept, "big.gguf", "READY", "rank-00-of-01/model.safetensors"]
    assert chosen(files, {"reshard.json": manifest}) == kept


def test_side_files_are_the_same_everywhere() -> None:
    documents: dict[str, object] = {
        "modules.json": [{"path": "1_Pooling"}],
        "tokenizer_config.json": {"ngram_file": "ngrams.dat"},
        "config.json": {"auto_map": {"AutoModel": "code/modeling_y.Y"}, "weights_file": "model.nemo"},
    }
    assert {*chosen(SIDE_FILES | STRAYS, documents)} - TRACKER == SIDE_FILES
    index = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"]
    assert chosen(index, {}) == ["model.safetensors.index.json"]
    large = {"config.json": 1, "README.md": LARGEST + 1}
    assert side_files(large, lambda _: None) == ["config.json"]


TRACKER = {"latest_checkpointed_iteration.txt"}
"""It is fetched, because it says what the weights are."""


# --- headers only --------------------------------------------------------------------------------------------------


def test_headers_only(hub: HubServer, client: Client) -> None:
    repository = hub.root / REPO
    for shard in SHARDS:  # one header within the first request, one beyond it
        file, pad = repository / shard, 200_000 if shard == SHARDS[0] else 0
        save_file(tensors(1, 40), file, metadata={"pad": "x" * pad})
    first = client(weights=Weights.HEADERS)
    assert sorted(first.got["headers"]) == SHARDS
    assert not any(r.range is None for r in hub.requests if r.host == "cdn")
    assert names(first.path) == {"config.json", "hf_quant_config.json", "model.safetensors.index.json"}
    for shard in SHARDS:
        full = (repository / shard).read_bytes()
        header = full[: 8 + int.from_bytes(full[:8], "little")]
        assert first.got["headers"][shard] == [len(full), header.hex()]

    hub.requests.clear()
    assert client(weights=Weights.HEADERS).got == first.got and not [r for r in hub.requests if r.host == "cdn"]
    assert client(weights=Weights.HEADERS, env={"HF_HUB_OFFLINE": "1"}).got == first.got
    assert "HF_HUB_OFFLINE" in client(env={"HF_HUB_OFFLINE": "1"}).error  # planning is possible, moving bytes is not

    whole = client()
    assert not whole.got["headers"] and names(whole.path) == WANTED
    assert client(weights=Weights.HEADERS).got == whole.got


def test_headers_only_of_a_file_that_is_no_safetensors(hub: HubServer, client: Client) -> None:
    (hub.root / REPO / SHARDS[0]).write_bytes(b"<html>this is not the file you are looking for</html>")
    assert f"{SHARDS[0]} is not a safetensors file" in client(weights=Weights.HEADERS).error


def test_headers_only_from_a_server_without_ranges(hub: HubServer, client: Client) -> None:
    hub.ignore_range = True
    assert "does not send parts" in client(weights=Weights.HEADERS).error


# --- lost connections ----------------------------------------------------------------------------------------------


def test_closed_connection_is_taken_up_in_mid_file(hub: HubServer, client: Client) -> None:
    mib = 2**20
    save_file({"large": np.arange(3 * mib)}, hub.root / REPO / SHARDS[0])  # the client keeps it in pieces of 10 MiB
    hub.drop_after_bytes = 15 * mib
    got = client(before=IMPATIENT)
    assert same_files(got.path, hub.root / REPO)
    assert [r.range for r in hub.requests if r.host == "cdn" and r.range] == [f"bytes={10 * mib}-"]


def test_reset_connection_is_tried_again(hub: HubServer, client: Client) -> None:
    hub.drop_after_bytes, hub.drop_by_reset = 20_000, True
    assert same_files(client(before=IMPATIENT).path, hub.root / REPO)


def test_server_that_hangs_up_for_good_is_a_clear_error(hub: HubServer, client: Client) -> None:
    hub.drop_after_bytes, hub.down_after_drop = 20_000, True
    assert "connection to the Hub" in client(before=IMPATIENT, env=BRIEF).error


def test_lost_server_is_a_clear_error_and_the_same_command_again_finishes(hub: HubServer, client: Client) -> None:
    (hub.root / REPO / SHARDS[0]).write_bytes(b"x" * 50_000)  # small enough to arrive
    hub.drop_after_bytes, hub.down_after_drop, hub.drop_by_reset = 60_000, True, True
    error = client(before=IMPATIENT, env=BRIEF).error
    assert "connection to the Hub" in error and REPO in error and "same command again" in error

    hub.down, hub.drop_after_bytes = False, None
    cached = {path.name for path in Path(hub.root.parent / "home").rglob("*.safetensors")}
    hub.requests.clear()
    assert same_files(client().path, hub.root / REPO)
    assert set(hub.downloads()) == set(SHARDS) - cached


# --- refusals ------------------------------------------------------------------------------------------------------


def test_private_repository_needs_a_token(hub: HubServer, client: Client) -> None:
    hub.require_token = "hf_right"
    assert "or a private one" in (error := client().error) and "token with token" in error and "hf auth login" in error
    assert "this token (401)" in client(token="hf_wrong").error
    assert names(client(token="hf_right").path) == WANTED
    assert {r.token for r in hub.requests if r.host == "cdn"} == {None}  # the token stays with the Hub


def test_token_from_the_environment(hub: HubServer, client: Client) -> None:
    hub.require_token = "hf_right"
    assert names(client(env={"HF_TOKEN": "hf_right"}).path) == WANTED


@pytest.mark.parametrize("headers_only", [False, True])
def test_gated_repository(hub: HubServer, client: Client, headers_only: bool) -> None:
    hub.gated = True
    error = client(weights=Weights.HEADERS if headers_only else Weights.FILES).error
    assert "gated" in error and f"{hub.url}/{REPO}" in error and "hf auth login" in error


def test_unknown_repository_or_folder(hub: HubServer, client: Client) -> None:
    hub.unknown.add(REPO)
    assert f"no folder {REPO} here, and no repository of that name on the Hub" in client().error
    assert "no folder tiny here, and no repository" in client("tiny").error


def test_unknown_revision(client: Client) -> None:
    assert "org/tiny has no revision v3" in client(revision="v3").error


def test_disk_too_small(hub: HubServer, client: Client) -> None:
    before = "import shutil, collections; shutil.disk_usage = lambda _: collections.namedtuple('u', 'free')(1000)\n"
    error = client(before=before).error
    assert (
        f"not enough space for {REPO}: " in error
        and "bytes are needed and 1,000 are free" in error
        and "cache_dir" in error
    )
    assert not set(hub.downloads()) & set(SHARDS)


def test_disk_full_on_the_way(client: Client) -> None:
    assert "no space left" in client(limit=50_000).error


# --- offline -------------------------------------------------------------------------------------------------------


def test_offline(hub: HubServer, client: Client) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    error = client(env=offline).error
    assert "HF_HUB_OFFLINE is set" in error and hub.requests == []
    online = client()
    hub.requests.clear()
    assert client(env=offline).got == online.got and hub.requests == []

    (online.path / SHARDS[1]).unlink()
    assert "not wholly" in client(env=offline).error


def test_unreachable_hub(client: Client) -> None:
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    assert "connection to the Hub (http://127.0.0.1:9) failed" in client(env=nowhere).error
    online = client()
    cached = client(env=nowhere)
    assert cached.got == online.got and "from the cache" in cached.stderr


def test_failing_hub(hub: HubServer, client: Client) -> None:
    online, once = client(), {"RESHARD_RETRY_SECONDS": "0"}
    hub.failure = 503
    assert client(env=once).got == online.got
    assert "503" in client(cache_dir=Path("empty"), env=once).error
    hub.failure = 429
    assert "too many requests (429)" in client(env=once).error


@pytest.mark.parametrize("status", [503, 429])
def test_a_busy_hub_is_asked_again(status: int, hub: HubServer, client: Client) -> None:
    online = client()
    for number in range(3):  # each of the first requests in turn: of the repository, and of its files
        hub.failures.extend([None] * number + [status, status])
        assert client(cache_dir=Path(f"empty-{number}")).got["commit"] == online.got["commit"]
        assert not hub.failures


# --- paths ---------------------------------------------------------------------------------------------------------


def test_local_path_is_left_alone(tmp_path: Path) -> None:
    assert find(str(tmp_path), HubAccess(), Weights.FILES) == tmp_path


def test_folder_comes_before_a_repository_of_the_same_name(hub: HubServer, client: Client, tmp_path: Path) -> None:
    (tmp_path / REPO).mkdir(parents=True)
    assert client().got["repo"] is None and hub.requests == []


@pytest.mark.parametrize(
    "source", ["./a", "../a", "/a", "~/a", "a/b/c", "a/b/", "a\\b", "a b", "org/a@v1", "", "a--b", "a" * 300]
)
def test_path_that_does_not_exist(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(CheckpointError, match="no such folder"):
        find(source, HubAccess(), Weights.RANGES)


@pytest.mark.parametrize(
    "source", ["https://huggingface.co/org/tiny/tree/main", "hf://org/tiny", "hf://models/org/tiny"]
)
def test_address_of_a_repository(source: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        fetch(source, HubAccess())
    assert caught.value.hint == "give the Hub id alone: org/tiny"


def test_import_does_not_import_the_client() -> None:
    code = "import sys, reshard.store.hub; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
