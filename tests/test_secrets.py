"""No password, token or signature of a URL leaves the program, whatever command it is given to, and in what place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from reshard.cli.commands import COMMANDS
from reshard.cli.printing import print_traceback
from reshard.commands.diff import DiffRequest
from reshard.commands.inspect import InspectRequest
from reshard.commands.plan import PlanRequest
from reshard.commands.split import PatchRequest, SplitRequest
from reshard.formats.errors import CheckpointError, redacted
from reshard.live.process import Meeting
from reshard.profile.job import ProfileRequest
from reshard.source.access import Access
from reshard.store.bucket import Bucket
from reshard.store.hub import _Request
from reshard.verify.command import VerifyRequest
from tests.marks import thorough
from tests.stores.store_server import StoreServer, status, upload
from tests.support import command, command_named, write_checkpoint

SECRET = "hunter2"
URLS = (
    f"s3://key:pa/ss@{SECRET}@bucket/x",
    f"https://user:{SECRET}/p@127.0.0.1:9/x",
    f"s3://key:12/{SECRET}@bucket/x",
    f"s3://bucket/x?X-Amz-Signature={SECRET}",
    f"ftp://user:{SECRET}@host/x",
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:p@secret@host/x?sig=secret", "https://host/x"),
        ("https://user:p/secret@host/x", "https://host/x"),
        ("https://user:p?secret@host/x", "https://…"),
        ("https://user:p@a?secret@host/x", "https://…"),
        ("https://host:80/x?to=a@secret", "https://host:80/x"),
        ("https://host/x?to=a@secret", "https://host/x"),
        ("s3://key:p/a@secret@bucket/x", "s3://bucket/x"),
        ("s3://key:12/secret@bucket/x", "s3://bucket/x"),
        ("s3:/key:secret@bucket/x", "s3:/bucket/x"),
        ("https://secret@host/x@1", "https://host/x@1"),
        ("s3://bucket/model@v1", "s3://bucket/model@v1"),
        ("http://127.0.0.1:9000/bucket/model@v1", "http://127.0.0.1:9000/bucket/model@v1"),
    ],
)
def test_what_is_kept_of_a_url(url: str, shown: str) -> None:
    assert redacted(url) == shown
    assert redacted(f"GET {url} failed, as did ({url}") == f"GET {shown} failed, as did ({shown}"
    error = CheckpointError(f"reading {url} failed", f"see {url}")
    assert (error.message, error.hint) == (f"reading {shown} failed", f"see {shown}")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("secrets") / "llama")


REQUIRED = {"split": ("--tp", "2"), "profile": ("--tp", "64"), "verify": ("--exact-only",)}
FLAGS = ("--debug", "--json")


def lines_of(name: str, url: str, checkpoint: Path, out: Path) -> Iterator[list[str | Path]]:
    """The command with the URL in the place of each argument and of each option that takes a text or a path."""
    found = command_named(name)
    arguments = [param for param in found.params if isinstance(param, click.Argument)]
    usual: dict[str | None, Path] = {param.name: checkpoint for param in arguments} | {"out": out, "folder": out}
    more = [name, *REQUIRED.get(name, ()), *(flag for flag in FLAGS if any(flag in of.opts for of in found.params))]
    for param in found.params:
        if isinstance(param, click.Argument):
            yield [*more, *(url if each is param else usual[each.name] for each in arguments)]
        elif isinstance(param.type, click.types.StringParamType | click.Path) and not param.is_flag:
            yield [*more, *(usual[each.name] for each in arguments), param.opts[-1], url]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_shows_or_writes_a_password(name: str, url: str, checkpoint: Path, tmp_path: Path) -> None:
    cache, work = tmp_path / "cache", tmp_path / "work"
    work.mkdir()
    environment = {
        "RESHARD_RETRY_SECONDS": "0", "HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "AWS_SKIP_SIGNATURE": "1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }  # fmt: skip
    for line in lines_of(name, url, checkpoint, tmp_path / "out"):
        done = command(*line, cwd=work, **environment)
        assert SECRET not in done.stdout + done.stderr, line
    assert_nothing_holds_it(tmp_path)


def assert_nothing_holds_it(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert SECRET not in path.name, path
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


@thorough
def test_no_command_shows_or_writes_the_query_of_a_url_that_works(checkpoint: Path, tmp_path: Path) -> None:
    """It may be a signature, and pages, manifests and JSON are passed on."""
    (tmp_path / "bucket").mkdir()
    page, out = tmp_path / "page.html", tmp_path / "out"
    with StoreServer(tmp_path / "bucket") as store:
        upload(checkpoint, store, "llama")
        url, bucket = f"{store.url}/bucket/llama?X-Amz-Signature={SECRET}", f"s3://bucket/llama?signature={SECRET}"
        assert command("split", checkpoint, tmp_path / "bucket/shards", "--tp", "2").returncode == 0
        shards, cold = url.replace("llama", "shards"), ("--cache-dir", tmp_path / "cache")
        lines = (
            ("split", url, out, "--tp", "2"), ("split", url, out, "--tp", "2", "--overwrite", "--json"),
            ("split", url, tmp_path / "more", "--tp", "2", "--dry-run"), ("merge", shards, tmp_path / "merged"),
            ("split", bucket, f"s3://bucket/new?signature={SECRET}", "--tp", "2", "-q"),
            ("split", url, tmp_path / "part", "--tp", "2", "--part", "0/2"),
            ("merge", shards, tmp_path / "json", "--json"), ("merge", url, tmp_path / "none"),
            ("inspect", url), ("inspect", shards, "--json"), ("plan", url), ("plan", url, "--json"),
            ("plan", url, "--tp", "2", "--report", page), ("plan", url, "--tp", "2", "--as", "vllm"),
            ("plan", url, "--tp", "2", "--json"), ("plan", url, "--save", tmp_path / "rules.toml"),
            ("formats", url), ("formats", url, "--json"),
            ("verify", url, out, "--exact-only", "--json", "--report", page), ("verify", url, out, "--exact-only"),
            ("verify", checkpoint, shards, "--exact-only", "--json"), ("inspect", tmp_path / "part.partial"),
        )  # fmt: skip
        codes = {line[0]: set[int]() for line in lines}
        for line in lines:
            done = command(*line, *cold, **store.environment)
            codes[line[0]].add(done.returncode)
            assert SECRET not in done.stdout + done.stderr, line
        store.always = status(500)
        done = command("split", url, tmp_path / "late", "--tp", "2", *cold, "--debug", **store.environment,
                       RESHARD_RETRY_SECONDS="0")  # fmt: skip
        assert done.returncode == 2 and "Traceback" in done.stderr and SECRET not in done.stderr
    assert page.exists() and all(0 in found for found in codes.values()), codes
    assert list(tmp_path.glob("part.partial/.reshard-*"))
    assert_nothing_holds_it(tmp_path)


def test_a_traceback_has_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError(f"no store at {URLS[0]}")
    except ValueError as error:
        print_traceback(error)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and "s3://bucket/x" in shown and SECRET not in shown


def test_no_object_shows_what_it_holds() -> None:
    """Reports of errors print the variables of a program."""
    bucket = Bucket(f"s3://key:{SECRET}@bucket/x")
    shown = f"{Access(token=SECRET)!r} {_Request('org/name', Access(token=SECRET))!r} {bucket!r} {bucket.name}"
    assert SECRET not in shown and "s3://bucket/x" in shown
    url = f"s3://key:{SECRET}@bucket/x"
    requests = (
        SplitRequest(url, url),
        VerifyRequest(url, url),
        PlanRequest(url),
        InspectRequest(url),
        ProfileRequest(url),
        DiffRequest(url, url, out=url),
        PatchRequest(url, url, delta=url),
        Access(adapter=url, patch=url),
        Meeting(store=f"tcp://{SECRET}@here:1", trainers=1, receivers=1),
    )
    assert SECRET not in repr(requests)
