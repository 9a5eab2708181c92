"""What transformers does not document is named in one module, and is there."""

from __future__ import annotations

import re
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import scan_cache_dir
from obstore import get
from obstore.store import from_url

from reshard.formats import hub_cache, torch_internals
from reshard.formats import transformers_internals as internals
from reshard.store import remote

SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9, "num_attention_heads": 2, "intermediate_size": 8}
ROOT = Path(__file__).parents[2]
PRIVATE = {
    "transformers_internals.py": (
        "transformers.conversion_mapping", "transformers.core_model_loading", "_model_mapping", "_is_hf_initialized",
        "_keys_to_ignore_on_save",
    ),
    "torch_internals.py": (
        "_python_dispatch", "_pytree", r"\w+\._parameters", r"(?!self\._buffers)\w+\._buffers", r"\w+\._modules",
        "_non_persistent_buffers_set", "torch.distributed.distributed_c10d", "_reparametrize_module",
    ),
    "remote.py": ("status code", "HTTP error", "non-partial response"),
}  # fmt: skip


def test_every_symbol_is_there() -> None:
    assert all(hasattr(internals, name) for name in internals.__all__)
    settings = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    auto = transformers.AutoModelForCausalLM
    assert internals.is_auto(auto) and not internals.is_auto(transformers.LlamaForCausalLM)
    assert internals.concrete_class(auto, settings.to_dict()) is transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(settings)
    assert internals.tied_weights(model) == {"lm_head.weight": "model.embed_tokens.weight"}
    assert hasattr(model, "_keys_to_ignore_on_save") and internals.not_saved(model) == ()
    assert isinstance(internals.get_model_conversion_mapping(model), list)


def test_a_module_that_has_first_values_keeps_them() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    linear = model.model.layers[0].mlp.up_proj
    kept, made = model.lm_head.weight.detach().clone(), linear.weight.detach().clone()
    for part in (*model.modules(), *model.parameters()):
        part._is_hf_initialized = False
    internals.has_first_values(model.lm_head)
    internals.has_first_values(model.lm_head.weight)
    model.init_weights()
    assert torch.equal(model.lm_head.weight, kept)
    assert not torch.equal(linear.weight, made)


@pytest.mark.parametrize("home", PRIVATE)
def test_nothing_else_names_them(home: str) -> None:
    files = {file for room in ("formats", "reshard", "verify") for file in (ROOT / room).rglob("*.py")}
    files.remove(ROOT / "verify/loader/watch.py")  # it runs where reshard is not
    words = re.compile("|".join(rf"(?<!\w){name}(?!\w)" for name in PRIVATE[home]))
    assert {file.name for file in files if words.search(file.read_text())} == {home}


def test_what_torch_does_not_document_is_there() -> None:
    assert all(hasattr(torch_internals, name) for name in torch_internals.__all__)
    norm = torch.nn.BatchNorm1d(2)
    assert set(torch_internals.own_parameters(norm)) == {"weight", "bias"}
    assert "running_mean" in torch_internals.own_buffers(norm)
    assert not torch_internals.unsaved_buffers(norm)
    norm.register_buffer("table", torch.zeros(1), persistent=False)
    assert torch_internals.unsaved_buffers(norm) == {"table"}
    held = torch.nn.ModuleList([torch.nn.Identity(), norm])
    torch_internals.renumber(held, [1])
    assert next(iter(held.state_dict())) == "1.weight"


class _Whole(BaseHTTPRequestHandler):
    """Sends the whole of what a part is asked of, and asks to come again for what is busy."""

    def do_GET(self) -> None:
        self.send_response(503 if self.path.endswith("busy") else 200)
        self.send_header("Content-Length", "4")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 23 Nov 2026 08:00:00 GMT")
        self.end_headers()
        self.wfile.write(b"1234")

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_what_obstore_says_in_words(scheme: str) -> None:
    with HTTPServer(("127.0.0.1", 0), _Whole) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        busy, whole = (_error(scheme, address, path) for path in ("busy", "whole"))
        server.shutdown()
    assert remote.status_of(busy) == "503" and remote.sends_no_parts(whole)
    assert remote.status_of(whole) is None and not remote.sends_no_parts(busy)
    assert remote.is_broken_connection(_error(scheme, address, "nobody"))


def _error(scheme: str, address: str, path: str) -> Exception:
    """What the store behind an address says when it is asked for a part of a file."""
    once = {"max_retries": 0, "backoff": {}, "retry_timeout": timedelta(seconds=1)}
    more = {"endpoint": address, "skip_signature": True, "region": "us-east-1"} if scheme == "s3" else {}
    url = address if scheme == "http" else "s3://bucket"
    store = from_url(url, client_options={"allow_http": True}, retry_config=once, **more)
    with pytest.raises(Exception) as caught:
        get(store, path, options={"range": (1, 2)})
    return caught.value


def test_the_cache_of_the_hub_is_laid_out_so(tmp_path: Path) -> None:
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id="org/name", repo_type="model")
    snapshot, blobs = tmp_path / name / "snapshots" / "main", tmp_path / name / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    (blobs / "etag").write_bytes(b"1234")
    (blobs / "other.incomplete").write_bytes(b"12")
    (snapshot / "config.json").symlink_to(blobs / "etag")
    assert hub_cache.etag_of(snapshot / "config.json", "config.json", 0.0) == "etag"
    assert hub_cache.begun_bytes(snapshot) == 2 and hub_cache.cache_of(snapshot) == tmp_path
    assert scan_cache_dir(tmp_path).repos and not scan_cache_dir(tmp_path).warnings


def test_a_download_folder_is_laid_out_so(tmp_path: Path) -> None:
    from huggingface_hub._local_folder import write_download_metadata

    (tmp_path / "config.json").write_text("{}")
    write_download_metadata(tmp_path, "config.json", "commit", "etag")
    changed = (tmp_path / "config.json").stat().st_mtime
    assert hub_cache.etag_of(tmp_path / "config.json", "config.json", changed) == "etag"
    assert hub_cache.etag_of(tmp_path / "config.json", "config.json", changed + 60) is None
