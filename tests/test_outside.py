"""What another package adds keeps the contracts of ``reshard.testing``: ``tests/outside`` is such a package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import reshard
from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.files.containers import ARCHIVE, SAFETENSORS, container_of
from reshard.formats.files.safetensors import read_header
from reshard.formats.notation import format_file
from reshard.formats.plugins import plugins
from reshard.testing import ContainerTests, FormatTests, QuantizationTests, StoreTests, write_model
from reshard.tiny_model import CONFIG
from tests.support import write_file

OUTSIDE = Path(__file__).parent / "outside"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package, as ``pip install`` leaves it: its modules and its entry points on the path."""
    monkeypatch.syspath_prepend(OUTSIDE)
    _forget()
    yield
    _forget()
    for name in ("acme", "acme.formats"):
        sys.modules.pop(name, None)


def _forget() -> None:
    plugins.cache_clear()
    format_file.format_names.cache_clear()
    format_file.READ.pop("acme", None)


class TestOfSafetensors(ContainerTests):
    container = SAFETENSORS
    dtypes = ("F32", "BF16", "F8_E4M3", "I64", "BOOL")


class TestOfArchives(ContainerTests):
    container = ARCHIVE


class TestOutsideContainer(ContainerTests):
    dtypes = ("F32", "BF16", "F16", "I8")

    @property
    def container(self) -> Any:  # type: ignore[override]
        return plugins("containers")["acme"]


class TestOutsideFormat(FormatTests):
    format = "acme"
    meshes = ({"tp": 2}, {"tp": 1}, {"tp": 4})


class TestOfSglang(FormatTests):
    format = "sglang"


class TestOutsideStore(StoreTests):
    @pytest.fixture
    def url(self, model: Path) -> str:
        return f"shelf:/{model}"

    def files(self, url: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = plugins("stores")["shelf"](url)
        return found


class TestOutsideQuantization(QuantizationTests):
    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """Matrices of eight bits, with a step for each output."""
        full, folder = write_model(tmp_path / "full"), tmp_path / "model"
        tensors = list[tuple[str, str, tuple[int, ...]]]()
        for file in sorted(full.glob("*.safetensors")):
            for name, info in read_header(file).tensors.items():
                is_packed = name.endswith("_proj.weight")
                tensors.append((name, "I8" if is_packed else info.dtype, info.shape))
                tensors += [(f"{name}_steps", "F32", (info.shape[0], 1))] if is_packed else []
        folder.mkdir()
        write_file(folder / "model.safetensors", tensors, 0)
        config = {**CONFIG, "quantization_config": {"quant_method": "acme_int8"}}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def test_without_the_package_its_tensors_are_refused(
        self, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "path", [place for place in sys.path if place != str(OUTSIDE)])
        plugins.cache_clear()
        with pytest.raises(PlanError, match="acme_int8"):
            reshard.split(model, tmp_path / "out", tp=2)


def test_a_format_of_a_package_is_listed() -> None:
    assert "acme" in format_file.names_to_write() and format_file.format_of("acme").loading.program.startswith("Acme")


def package(folder: Path, entry_points: str, **files: str) -> Path:
    """Another package, with a module."""
    (folder / "other-1.0.dist-info").mkdir(parents=True)
    (folder / "other-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (folder / "other-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    (folder / "other").mkdir()
    for name, text in {"__init__.py": "", **files}.items():
        (folder / "other" / name).write_text(text)
    return folder


def test_two_packages_that_add_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[reshard.containers]\nacme = acme:CONTAINER\n\n[reshard.stores]\ns3 = acme:files_of\n"
    monkeypatch.syspath_prepend(package(tmp_path, text))
    _forget()
    with pytest.raises(PlanError, match=r"two packages add 'acme' to reshard\.containers"):
        container_of("weights.acme")
    assert container_of("weights.safetensors") is SAFETENSORS


def test_two_containers_of_one_ending_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package(tmp_path, "[reshard.containers]\nsecond = acme:CONTAINER\n"))
    _forget()
    with pytest.raises(CheckpointError, match=r"weights\.acme: containers of two packages are called so"):
        container_of("weights.acme")


def test_a_store_of_a_package_has_no_revisions(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert reshard.inspect(f"shelf:/{model}").complete
    with pytest.raises(CheckpointError, match="is at a URL: there is no revision main of it"):
        reshard.inspect(f"shelf:/{model}", revision="main")


def test_a_second_format_of_a_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package(tmp_path, "[reshard.formats]\nother = other\n", **{"vllm.toml": ""}))
    _forget()
    with pytest.raises(PlanError, match="two formats are called 'vllm'"):
        format_file.format_names()


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(package(tmp_path, "[reshard.containers]\nother = other:NONE\n"))
    _forget()
    with pytest.raises(PlanError, match="other:NONE of other is no container") as refused:
        container_of("weights.none")
    assert refused.value.hint == "mend or remove other"
