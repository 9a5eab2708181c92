"""``reshard profile``: what the ranks measure adds up to the model, and the arithmetic beside it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reshard.formats.errors import CheckpointError
from reshard.formats.mesh import mesh_of
from reshard.mesh.plan import make_plan
from reshard.mesh.totals import all_reduces
from reshard.model.skeleton import skeleton
from reshard.profile.cost import (
    DegreeRow,
    LinkRate,
    Memory,
    NotRun,
    Time,
    communication,
    fit,
    fit_link,
    joined,
    recommend,
)
from reshard.profile.job import LayerKind, Measured, ProfileJob, ProfileRequest, RankResult, Span, Workload, layer_kinds
from reshard.profile.page import page
from reshard.profile.processes import RESERVE
from reshard.profile.run import node_of
from reshard.verify.rank.group import RankError
from tests import zoo
from tests.marks import thorough
from tests.support import LLAMA, command, ok, refused
from tests.verify import browser
from tests.verify.browser import Browser
from tests.verify.conftest import Gpus

pytestmark = thorough

CONFIG = {**LLAMA, "hidden_size": 24, "head_dim": 6, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which there is nothing but the config.json."""
    made = tmp_path_factory.mktemp("profile")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


@pytest.fixture(scope="module")
def document(folder: Path, fork_server: None) -> dict[str, Any]:
    """What two ranks measured of everything that there is to measure."""
    given = ("--tp", "2", "--batch", "3", "--seq", "8", "--phase", "decode,prefill,train", "--predict-tp", "4")
    more = ("--report", folder / "page.html", "--ranks", "2", "--seconds", "0.01", "--json")
    done = ok("profile", folder, *given, *more)
    assert f"Drew the profile: {folder / 'page.html'}" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_page_that_cannot_be_written_loses_no_measurement(folder: Path, fork_server: None) -> None:
    given = ("--tp", "1", "--seq", "8", "--phase", "decode", "--seconds", "0.01", "--report", "/proc/page.html")
    done = command("profile", folder, *given)
    assert done.returncode == 2 and "cannot write /proc/page.html" in done.stderr and "tokens/s" in done.stdout, done


def test_two_ranks(folder: Path, document: dict[str, Any]) -> None:
    """The bytes through all-reduces are those that the plan states, in each phase; KV cache and weights by hand."""
    found = document
    plan = make_plan(skeleton(folder), mesh_of(2))
    forward, backward = all_reduces(plan)
    assert forward.nbytes == 7 * CONFIG["hidden_size"] * 2
    measured = {row["phase"]: row for row in found["rows"] if row["tp"] == 2}
    assert [*measured] == ["decode", "prefill", "train"]
    for phase, row in measured.items():
        stated = forward.nbytes + (backward.nbytes if phase == "train" else 0)
        assert row["all_reduce_bytes_per_token"] == row["all_reduce_bytes_per_token_of_plan"] == stated
        parts = row["measured"]["parts"]
        assert {name: part["count"] for name, part in parts.items()} == {"embedding": 1, "layer 0": 3, "head": 1}
        assert all(part["compute"] > 0 and part["collectives"] > 0 for part in parts.values())
        total = sum(part["count"] * (part["compute"] + part["collectives"]) for part in parts.values())
        assert row["measured"]["seconds"] == pytest.approx(total)
        assert row["tokens_per_second"] == pytest.approx(3 * (1 if phase == "decode" else 8) / total)
    # 2 of 4 KV heads of 6 numbers, keys and values, in 3 layers, of 3 sequences
    assert measured["prefill"]["memory"]["cache"] == 3 * 3 * 8 * 2 * 2 * 6 * 2
    assert measured["decode"]["memory"]["cache"] == 3 * 3 * 9 * 2 * 2 * 6 * 2
    assert measured["train"]["memory"]["gradients"] == measured["train"]["memory"]["weights"]
    assert measured["train"]["memory"]["activations"] > 3 * measured["prefill"]["memory"]["activations"]
    predicted = [row for row in found["rows"] if row["tp"] == 4]
    assert len(predicted) == 3 and all(row["measured"] is None and row["predicted"]["seconds"] > 0 for row in predicted)
    assert predicted[0]["memory"]["cache"] * 2 == measured["decode"]["memory"]["cache"]
    assert found["recommended"]["tp"] == 2


def test_a_second_table_is_summed_too(tmp_path: Path) -> None:
    """Gemma 4 looks up each token twice: a hidden state, and 6 numbers for each of 4 layers. The head is the first."""
    with torch.device("meta"):
        model = zoo.ZOO["gemma4_text"].build(None, {}, None)
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__], "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    forward, backward = all_reduces(make_plan(skeleton(tmp_path), mesh_of(2)))
    hidden = config["hidden_size"]
    assert (forward.count, forward.nbytes) == (2 * 4 + 2, (2 * 4 * hidden + hidden + 6 * 4) * 4)
    assert (backward.count, backward.nbytes) == (2 * 4 + 1, (2 * 4 * hidden + hidden) * 4)


# ------------------------------------------------------------------------------------------------------------- page


def bars(text: str) -> list[list[tuple[str, float, float]]]:
    """Of each bar of a page, its parts: the class, where it begins and how long it is, in percent."""
    part = r'<rect class="bar (c\d(?: open)?)" x="([\d.]+)" y="0" width="([\d.]+)"'
    svgs = re.findall(r'<svg viewBox="0 0 100 10".*?</svg>', text)
    return [[(kind, float(x), float(width)) for kind, x, width in re.findall(part, svg)] for svg in svgs]


def test_bars_are_to_scale(document: dict[str, Any]) -> None:
    """Parts follow each other; the longest of a workload is 100; what is predicted is open, but for its memory. The
    legend names each colour of a figure that has several.
    """
    row = next(row for row in document["rows"] if row["phase"] == "decode" and row["measured"])
    other = next(row for row in document["rows"] if row["phase"] == "decode" and not row["measured"])
    time = {**row["measured"], "seconds": 4.0, "compute": 3.0, "collectives": 1.0}
    memory = {**row["memory"], "weights": 60, "gradients": 0, "cache": 30, "activations": 10, "total": 100}
    rows = [
        {**row, "tokens_per_second": 10.0, "measured": time, "memory": memory},
        {**other, "tokens_per_second": 20.0, "predicted": {**time, "seconds": 2.0, "compute": 1.5, "collectives": 0.5},
         "memory": {**memory, "weights": 30, "total": 70}},
    ]  # fmt: skip
    text = page({**document, "rows": rows})
    assert bars(text) == [
        [("c0", 0, 50)], [("c0 open", 0, 100)],
        [("c0", 0, 75), ("c1", 75, 25)], [("c0 open", 0, 37.5), ("c1 open", 37.5, 12.5)],
        [("c0", 0, 60), ("c1", 60, 30), ("c2", 90, 10)], [("c0", 0, 30), ("c1", 30, 30), ("c2", 60, 10)],
    ]  # fmt: skip
    legends = re.findall(r'<p class="legend">(.*?)</p>', text)
    names = [re.findall(r"</svg>([^<]+)", legend) for legend in legends]
    assert names == [["predicted"], ["computing", "collectives", "predicted"], ["weights", "cache", "activations"]]
    assert "70 B, does not fit" in page({**document, "rows": [rows[0], {**rows[1], "fits": False}]})


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (400, "light"), (1600, "dark"), (1600, "light")])
@pytest.mark.usefixtures("document")
def test_page_in_a_browser(width: int, scheme: str, chromium: Browser, folder: Path) -> None:
    file = folder / "page.html"
    chromium.open(file, width=width, scheme=scheme)
    assert max(chromium.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")) <= width
    asked = [e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [file.as_uri()]
    assert not [e for e in chromium.events if e["method"] in {"Runtime.exceptionThrown", "Log.entryAdded"}]
    shown = "[...document.querySelectorAll('svg[role]')].filter(s => s.getBoundingClientRect().width)"
    assert chromium.evaluate(f"{shown}.length") == 3 * 3 * 2  # of each phase: three figures of two degrees
    outside = (
        # a browser adds where a bar begins and its length as 32-bit floats: 31.1 and 68.9 may be more than 100
        f"{shown}.flatMap(s => {{const e = 1e-4, o = s.getBoundingClientRect(); return [...s.querySelectorAll('.bar')]"
        ".filter(m => {const r = m.getBoundingClientRect();"
        " return r.left < o.left || r.right > o.right + e || r.top < o.top || r.bottom > o.bottom + e})}).length"
    )
    assert chromium.evaluate(outside) == 0
    assert len(chromium.evaluate(browser.WIDTHS_OF_SECTIONS)) == 1 and chromium.evaluate(browser.TABLES_CUT) == 0
    colours = "[...document.querySelectorAll('.bar')].map(m => getComputedStyle(m).stroke)"
    assert all(colour.startswith("rgb") for colour in chromium.evaluate(colours))


def test_what_the_page_says(document: dict[str, Any]) -> None:
    text = page({**document, "source": "a <b>model</b>"})
    assert "a &lt;b&gt;model&lt;/b&gt;" in text and "<b>" not in text and "Use tp 2" in text
    assert text.count("tp 4: ") == 2 * 3 * 3 and text.count("predicted") > 6 and text.count("not measured") == 3
    assert "Training: forward and backward, without optimizer states" in text
    alone = [{"phase": "decode", "batch": 3, "seq": 8, "tp": 4}]
    none = page({**document, "recommended": {"tp": None, "reason": "no degree fits", "alone": alone}})
    assert "For decode, batch 3, seq 8 alone: tp 4." in none
    assert "<h1>No degree fits</h1>" in none


# ------------------------------------------------------------------------------------------------------- arithmetic


def test_the_slowest_computes_and_the_last_to_come_sends() -> None:
    """Of ranks side by side, and of repetitions the middle one."""

    def step(compute: float, send: float) -> tuple[Span, ...]:
        return Span("head", "compute", 0, compute), Span("head", "all-reduce", 64, send)

    first, second = (step(2, 3), step(4, 1), step(6, 9)), (step(1, 2), step(5, 1), step(9, 9))
    spans, spread = joined([first, second])
    assert spans == (Span("head", "compute", 0, 5), Span("head", "all-reduce", 64, 2))
    assert spread > 0 and joined([first[:1]])[1] == 0


def test_the_plan_states_the_collectives(folder: Path) -> None:
    """Of a step of 2 sequences: what a prediction sends, by hand. The logits of inference are gathered, 19 of 37."""
    plan, link = make_plan(skeleton(folder), mesh_of(2)), LinkRate(2, 1.0, 4.0)
    assert layer_kinds(plan.model) == (LayerKind(0, 3),)
    sent = (3 * 2 + 1) * 24 * 2  # bytes of a token
    assert communication(plan, Workload("decode", 2, 16), link) == 7 + 2 * sent / 4 + 0.5 + 2 * 19 * 2 / 4
    assert communication(plan, Workload("train", 2, 16), link) == 14 + 2 * 32 * sent / 4
    assert communication(make_plan(plan.model, mesh_of(4)), Workload("train", 2, 16), LinkRate(4, 0.0, 4.0)) == (
        2 * 32 * sent * 1.5 / 4
    )


def test_rates_are_found_again() -> None:
    """The rates that made the times; fewer of them where there are few points, and none below zero."""
    rates = (1e-4, 2e-12, 3e-11)
    known = [(1.0, 10.0**a, 10.0**b) for a, b in ((6, 9), (9, 6), (12, 7), (3, 3), (11, 10))]
    times = [sum(n * rate for n, rate in zip(row, rates, strict=True)) for row in known]
    assert fit(known, times) == pytest.approx(rates, rel=1e-3)
    assert fit([(1.0, 1e9, 1e3)], [2.0]) == [pytest.approx(2.0), 0, 0]
    assert min(fit([(1.0, 1e9, 1.0), (1.0, 2e9, 1.0)], [1.0, 0.5])) >= 0


def test_a_link_is_found_again() -> None:
    """Latency and bandwidth of a ring; more ranks take more steps, and a given bandwidth replaces the fitted one."""
    sizes = [1 << power for power in range(10, 26, 2)]
    found = fit_link(4, [(n, 2e-5 + 1.5 * n / 1e10) for n in sizes])
    assert (found.latency, found.bandwidth) == pytest.approx((2e-5, 1e10), rel=1e-3)
    assert [nbytes for nbytes, _ in found.measured] == sizes
    link = LinkRate(4, 2e-5, 1e10)
    assert link.over(8) == LinkRate(8, pytest.approx(2e-5 * 7 / 3), 1e10) and link.over(8, 4.5e11).bandwidth == 4.5e11


def rows(rates: dict[int, float], needs: dict[int, int], share: float = 0.46) -> list[DegreeRow]:
    """Degrees with tokens per second and bytes, of 80 GB a rank."""
    part = {tp: Time((1 - share) / rate, share / rate) for tp, rate in rates.items()}
    work = Workload("decode", 1, 1)
    return [DegreeRow(tp, work, part[tp], None, Memory(needs[tp], 0, 0, 0), 80_000_000_000, 0) for tp in rates]


@pytest.mark.parametrize(
    ("rates", "expected", "reason"),
    [
        (
            (10, 19, 36, 40),
            4,
            "the smallest that fits 80.00 GB a rank; tp 8 spends 46% in collectives and gains 11% of a possible 100%",
        ),
        ((10, 19, 36, 60), 8, "it needs 25.00 GB of 80.00 GB a rank; 1.67 times as fast as tp 4"),
        (
            (10, 19, 36, 30),
            4,
            "the smallest that fits 80.00 GB a rank; tp 8 spends 46% in collectives and is 17% slower",
        ),
    ],
)
def test_one_degree_and_its_reason(rates: tuple[float, ...], expected: int, reason: str) -> None:
    speeds = dict(zip((1, 2, 4, 8), rates, strict=True))
    needs = {tp: 200_000_000_000 // tp for tp in speeds}
    found = recommend(rows(speeds, needs))
    assert (found.tp, found.reason) == (expected, reason)


def test_a_larger_degree_makes_room_for_sequences() -> None:
    """What weights and activations leave free, by the cache of one sequence, which is divided too."""
    work = Workload("decode", 4, 2048)
    few, many = (
        replace(row, workload=work, memory=Memory(row.memory.weights, 4_000_000_000 // row.tp, 1_000_000_000, 0))
        for row in rows({2: 10.0, 4: 11.0}, {2: 70_000_000_000, 4: 35_000_000_000})
    )
    assert (few.sequences, many.sequences) == (9 * 2, 44 * 4)
    assert recommend([few, many]).reason.endswith(
        "gains 10% of a possible 100%, with room for 9.8 times as many sequences"
    )
    full = replace(few, capacity=71_000_000_000)
    assert full.sequences == 0 and not full.fits
    assert replace(few, memory=replace(few.memory, cache=0)).sequences is None


def test_no_degree_is_faster() -> None:
    """Of equal ones, the smallest; what is slower is no gain."""
    assert recommend(rows(dict.fromkeys((1, 2, 4, 8), 10.0), dict.fromkeys((1, 2, 4, 8), 7))).tp == 1
    found = recommend(rows({1: 10.0, 2: 5.0}, {1: 7, 2: 7}))
    assert (found.tp, found.reason) == (
        1, "it needs 7 B of 80.00 GB a rank; tp 2 spends 46% in collectives and is 50% slower"
    )  # fmt: skip


def test_a_degree_without_memory_even_for_a_part_does_not_fit() -> None:
    """Whatever the account of the whole says."""
    first, second = rows({1: 10.0, 2: 5.0}, {1: 7, 2: 7})
    missing = replace(first, measured=None, predicted=first.measured, not_run=NotRun("memory ran out", ran_out=True))
    assert not missing.fits and recommend([missing, second]).tp == 2
    assert replace(missing, not_run=NotRun("too little is free", ran_out=False)).fits


def test_no_degree_fits() -> None:
    found = recommend(rows({1: 10.0, 2: 20.0}, {1: 400_000_000_000, 2: 200_000_000_000}))
    assert found.tp is None
    assert (
        found.reason == "no degree fits: decode, batch 1, seq 1 at tp 2 needs 200.00 GB a rank, and 80.00 GB are there"
    )


# ----------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--tp", "3"), "--tp 3 is not possible: 8 attention heads do not divide by 3"),
        (
            ("--tp", "1", "--predict-tp", "16"),
            "Error: --predict-tp 16 is not possible: 8 attention heads do not divide by 16",
        ),
        (("--tp", "8", "--ranks", "2"), "--tp 8 is not possible: this node has 2 ranks"),
        (("--device", "cuda"), "--device cuda is not possible: torch finds no accelerator"),
        (("--memory", "80"), "'80' is 80 bytes; with a unit it is 80GB or 80MB"),
        (("--phase", "decode,sleep"), "--phase sleep is not possible: it is one of decode, prefill, train"),
        (("--tp", "1,two"), "'1,two' is no list of numbers such as 1,2,4 or 1024..16384"),
        (("--link", "450GB/s"), "--link is not possible: it is for predicted degrees"),
        (("--predict-tp", "8", "--link", "450GB"), "'450GB' is not a speed such as 450GB/s"),
        (("--dtype", "int8"), "--dtype int8 is not possible"),
        (
            ("--batch", "1000000", "--seq", "1000000"),
            "too little memory: tp 1, decode, batch 1000000, seq 1000000: needs",
        ),
    ],
)
def test_errors_are_one_line(folder: Path, arguments: tuple[str, ...], error: str) -> None:
    done = command("profile", folder, *(arguments if "--tp" in arguments else ("--tp", "1", *arguments)))
    first, *hints = done.stderr.removeprefix("reading config.json\n").splitlines()
    assert done.returncode == 2 and not done.stdout
    assert error in first and first.startswith("Error: ") and len(hints) <= 1, done.stderr


@pytest.mark.parametrize(("phase", "seq", "most"), [("decode", 64, 63), ("prefill", 65, 64)])
def test_more_tokens_than_a_model_has_positions_for(phase: str, seq: int, most: int, tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 24, "n_layer": 2, "n_head": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_positions": 64, "vocab_size": 37}))
    done = command("profile", tmp_path, "--tp", "1", "--phase", phase, "--seq", str(seq))
    why = f"{phase} takes 65 positions, and the model has a table of 64"
    assert f"Error: --seq {seq} is not possible: {why}\nHint: give --seq {most}\n" in done.stderr


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    assert "t5 has an encoder beside its decoder" in command("profile", tmp_path).stderr


def test_what_a_model_cannot_do_is_no_failure_of_a_rank(tmp_path: Path, fork_server: None) -> None:
    config = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 24, "num_hidden_layers": 2}
    sizes = {"num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 37, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sizes}))
    done = command("profile", tmp_path, "--tp", "1", "--phase", "decode", "--seq", "8")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "Error: decode is not possible: BertForMaskedLM keeps no keys and values by layers",
        "Hint: --phase prefill",
    ]


def test_a_file_that_is_no_config_json(tmp_path: Path) -> None:
    (tmp_path / "llama.json").write_text("{}")
    assert "llama.json: not a folder\nHint: give the folder that holds config.json, or that file" in command(
        "profile", tmp_path / "llama.json"
    ).stderr  # fmt: skip


def test_interrupted(folder: Path) -> None:
    """One line, whatever is being imported or run."""
    run = subprocess.Popen(
        [sys.executable, "-m", "reshard", "profile", folder, "--tp", "1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert run.stderr is not None
    assert run.stderr.readline() == "reading config.json\n"
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "reshard: interrupted\n")


@pytest.fixture
def two_gpus(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch says of a node with two GPUs; whoever takes memory of one in this process fails."""
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: including_emulation)
    return gpus(2, get_device_properties=lambda i: SimpleNamespace(total_memory=RESERVE + 1000 - i))


def test_a_node_with_gpus(two_gpus: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank a GPU, and no more; the memory of the smaller one; the dtype that they have."""
    assert node_of(ProfileRequest("model")).ranks == 2 and node_of(ProfileRequest("model", ranks=1)).ranks == 1
    assert [node_of(ProfileRequest("model")).memory(degree) for degree in (1, 2, 16)] == [1000, 999, 999]
    assert node_of(ProfileRequest("model", device="cpu")).device == "cpu"
    for arguments, error in (
        (("--ranks", "3"), "--ranks 3 is not possible: this node has 2 GPUs"),
        (("--tp", "4", "--dtype", "float16"), "--tp 4 is not possible: this node has 2 GPUs"),
        (("--tp", "2"), "these GPUs do not compute in bfloat16"),
    ):
        assert f"Error: {error}" in command("profile", folder, *arguments).stderr
    without_memory(monkeypatch, least=4, message="torch.OutOfMemoryError: CUDA out of memory")
    assert "too little memory: tp 1, prefill, batch 1, seq 1: needs" in refused(
        "profile", folder, "--dtype", "float16", "--batch", "1,4", "--phase", "prefill", "--seq", "1"
    )


def test_training_on_a_gpu(two_gpus: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits, fits without optimizer states: the reason and the table say so. No variable of NCCL stays."""
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    two_gpus.get_device_properties = lambda _: SimpleNamespace(total_memory=RESERVE + 10**6)
    without_memory(monkeypatch, least=4, message="torch.OutOfMemoryError: CUDA out of memory")
    asked = ("--tp", "1", "--dtype", "float16", "--batch", "1", "--phase", "train", "--seq", "1")
    done = ok("profile", folder, *asked)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert "train, batch 1, seq 1: forward and backward, without optimizer states" in done.stdout
    assert "of 1.00 MB a rank without optimizer states" in done.stdout
    none = command("profile", folder, *asked, "--memory", "1000B").stdout
    assert "a rank without optimizer states, and 1.00 kB are there" in none


def without_memory(monkeypatch: pytest.MonkeyPatch, least: int, message: str, after: str = "") -> list[list[str]]:
    """Let runs of at least so many sequences run out of memory, and what comes ``after`` those of fewer; what was asked
    of the ranks in each attempt.
    """
    asked: list[list[str]] = []

    def run(
        _: object, degree: int, job: ProfileJob, *, progress: Callable[[str], None], **__: object
    ) -> list[RankResult]:
        asked.append([str(workload) for workload in job.workloads])
        for workload in job.workloads:
            progress(f"tp {degree}: {workload}")
            if workload.batch >= least:
                progress(f"tp {degree}: {workload}: a run takes 4 s, and two more follow")
                raise RankError(message, rank=0)
        if after:
            progress(f"tp {degree}: {after}")
            raise RankError(message, rank=0)
        parts = ("embedding", *(kind.part for kind in job.kinds), "head")
        step = tuple(Span(part, "compute", 0, 1.0) for part in parts)
        measured = Measured((step,), dict.fromkeys(parts, (1.0, 1.0)), {}, 0, {})
        return [RankResult(dict.fromkeys(job.workloads, measured), {}, "gloo", "cpu")] * degree

    monkeypatch.setattr(import_module("reshard.profile.run"), "run_processes", run)
    return asked


@pytest.mark.parametrize(
    "message",
    [
        "rank 0 of 1 was ended by SIGKILL",
        "torch.OutOfMemoryError: CUDA out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_ends_in_a_rank(message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel, a GPU's allocator and a CPU's say is one thing; what takes less runs nevertheless."""
    asked = without_memory(monkeypatch, least=4, message=message)
    done = ok("profile", folder, "--tp", "1", "--batch", "2,4,8", "--seq", "4", "--phase", "prefill,decode")
    names = [f"{phase}, batch {batch}, seq 4" for phase in ("prefill", "decode") for batch in (2, 4, 8)]
    assert asked == [names, [names[0], *names[3:]], [names[0], names[3]]]
    assert done.stdout.count("tp 1 was not run: memory ran out at prefill, batch 4, seq 4") == 2
    assert done.stdout.count("tp 1 was not run: memory ran out at decode, batch 4, seq 4") == 2
    assert "Recommended: none. No degree fits: at tp 1 memory ran out at prefill, batch 4, seq 4.\n" in done.stdout


def test_another_failure_of_a_gpu_is_no_lack_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "rank 0 of 1 failed: RuntimeError: CUDA error: no kernel image is available for execution on the device"
    asked = without_memory(monkeypatch, least=4, message=message)
    done = command("profile", folder, "--tp", "1", "--batch", "2,4", "--seq", "4", "--phase", "prefill")
    assert (done.returncode, len(asked), f"Error: {message}" in done.stderr) == (2, 1, True)


def test_memory_that_ends_after_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = without_memory(monkeypatch, least=4, message="CUDA out of memory", after="all-reduces")
    done = command("profile", folder, "--tp", "1", "--batch", "2", "--phase", "prefill", "--seq", "4")
    assert asked == [["prefill, batch 2, seq 4"]]
    assert (done.returncode, "tp 1, prefill, batch 2, seq 4: memory ran out" in done.stderr) == (2, True), done


def test_no_memory_for_anything(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_memory(monkeypatch, least=1, message="rank 0 of 1 was ended by SIGKILL")
    done = command("profile", folder, "--tp", "1", "--phase", "prefill", "--batch", "2", "--seq", "4")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2:] == [
        "Error: too little memory: tp 1, prefill, batch 2, seq 4: memory ran out at prefill, batch 2, seq 4",
        "Hint: give a smaller batch or seq, or another degree",
    ]


def test_a_workload_that_asks_for_another_degree() -> None:
    """Together the phases gain 1.5 times by each doubling; one of them more, one less."""
    fast, slow = rows({1: 10.0, 2: 20.0}, {1: 1, 2: 1}), rows({1: 10.0, 2: 10.5}, {1: 1, 2: 1})
    other = Workload("prefill", 1, 1)
    found = recommend([*fast, *(replace(row, workload=other) for row in slow)])
    assert (found.tp, found.alone) == (1, ((Workload("decode", 1, 1), 2),))
    assert recommend(fast).alone == ()


def test_predicted_degrees_are_recommended_only_if_no_other_fits() -> None:
    known = rows({1: 10.0, 2: 20.0, 4: 40.0}, {1: 10, 2: 10, 4: 10})
    known[2] = replace(known[2], measured=None, predicted=known[2].measured)
    assert recommend(known).tp == 2
    assert recommend(known).reason.endswith(
        "; tp 4 is predicted to spend 46% in collectives and gain 100% of a possible 100%"
    )
    full = [*(replace(row, capacity=9) for row in known[:2]), known[2]]
    found = recommend(full)
    assert found.tp == 4 and "by prediction alone" in found.reason


def test_a_config_of_too_many_layers_is_refused_before_a_model_is_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 2_000_000_000}))
    with pytest.raises(CheckpointError, match=r"config\.json: 'layer' is 2,000,000,000"):
        skeleton(tmp_path)
