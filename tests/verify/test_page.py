"""The report page: what it says, that nothing in it can do harm, and how it looks in a real browser."""

from __future__ import annotations

import copy
import html.parser
import json
import math
import os
import stat
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from reshard.api import split
from reshard.cli.printing import write_report
from reshard.formats.errors import CheckpointError, printable
from reshard.text import number, ratio
from reshard.verify.report.page import COLUMNS, page
from tests import zoo
from tests.marks import of_ranks, thorough
from tests.support import command
from tests.verify import browser
from tests.verify.browser import Browser

pytestmark = [thorough, of_ranks]

ROOT = Path(__file__).parents[2]
HOSTILE = [
    "</script><img src=x onerror=alert(1)>",
    "</style></title><script>document.title='owned'</script>",
    "\"><svg onload=alert(1)> ' onmouseover='alert(1)",
    "<!--", "]]>", "&lt;b&gt;", "javascript:alert(1)", "\x1b[31mred\x1b[0m", "left\u202egnp.exe", "\ud800", "a\x00b",
    "http://example.com/a.png", "x" * 400,
]  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- documents


def row(name: str, error: float | str, noise: float | str, ratio: float | str, is_same: bool = True) -> dict[str, Any]:
    worst = "all" if is_same else "token 5"
    return {
        "name": name, "error": error, "noise": noise, "ratio": ratio, "worst": worst, "rank": 1, "is_same": is_same
    }  # fmt: skip


def layers(count: int) -> Iterator[str]:
    yield "embedding"
    for i in range(count):
        yield from (f"model.layers.{i}.self_attn.o_proj", f"model.layers.{i}.mlp.down_proj", f"model.layers.{i}")
    yield "logits"


def forward(count: int = 4) -> dict[str, Any]:
    rows = [row(name, 0.011 + i * 1e-4, 0.014 + i * 1e-4, 0.78) for i, name in enumerate(layers(count))]
    bins = [[(i - 20) / 200, int(4000 * math.exp(-((i - 20) ** 2) / 40)), 40 if i % 3 else 0] for i in range(41)]
    return {
        "is_same": True, "verdict": "The forward pass sees no difference: the worst place has 0.78 times the noise.",
        "effect": None, "repeated": None, "reason": None, "cut": [], "first": None, "failure": None, "factor": 4.0,
        "power": {"noise": 0.0149, "place": "logits", "seen_from": 0.0596, "bias_ratio": None, "bias_place": None,
                  "is_poor": False}, "layers": rows, "gradients": [row("lm_head.weight", 1e-3, 2e-3, 0.5)],
        "logits": {
            "max_error": 0.07, "own_max_error": 0.068, "relative_error": 0.015, "own_relative_error": 0.0143,
            "kl": 1.13e-4, "own_kl": 1.1e-4, "agreement": 0.96875, "own_agreement": 1.0, "positions": 64,
            "mismatches": [{"position": 7, "expected": 24, "found": 88, "margin": 6.93e-3}], "histogram": bins,
        },
        "choices": 180, "own_overruled": 3, "overruled": 4, "unused": ["vision.tower.weight"], "mesh": {"tp": 2},
        "ranks": 2, "dtype": "bfloat16", "exact_dtype": "float32", "device": "cpu", "backend": "gloo", "batch": 2,
        "seq": 32, "seed": 0, "seconds": 1.5, "versions": {"torch": "2.7.1", "transformers": "5.0.0"},
    }  # fmt: skip


def exact() -> dict[str, Any]:
    return {
        "verdict": "same", "mesh": "tp 2", "ranks": 2, "tensors": 30, "nbytes": 276800, "first": None, "damages": [],
        "missing": [], "extra": [], "configs": [], "problems": [], "format": None, "is_listed": True,
        "not_compared": [], "cast": None,
    }  # fmt: skip


def same() -> dict[str, Any]:
    return {
        "schema_version": 1, "command": "verify", "original": "/models/llama", "shards": "/models/llama-tp2",
        "verdict": "same", "summary": "Every byte is the original's.", "plan": None, "exact": exact(),
        "forward": forward(), "engine": None, "error": None, "notes": [], "options": {"batch": 2, "seed": 0},
        "seconds": {"bytes": 0.2, "forward": 9.0}, "environment": {"reshard": "0.1.0", "python": "3.11.7"},
        "created": "2030-01-01T00:00:00+00:00",
    }  # fmt: skip


def different() -> dict[str, Any]:
    document = same()
    name = "model.layers.2.mlp.gate_proj.weight"
    document |= {"verdict": "different", "summary": f"Bytes differ, first in tensor '{name}' at [0, 7] on rank 1."}
    document["exact"] |= {
        "verdict": "different",
        "first": {
            "tensor": name, "index": [0, 7], "rank": 1, "file": "/s/rank-01-of-02/model.safetensors", "offset": 66256,
            "expected": "cb3a", "found": "2bbe", "original_file": "/o/model.safetensors", "original_offset": 128040,
            "stored": None, "because": "padding",
        },
        "damages": [{"tensor": name, "rank": 1, "nbytes": 5197, "elements": 2879, "stored": None}],
        "missing": ["rank-00-of-02: model.norm.weight"], "extra": ["stray.safetensors"],
        "configs": [{"file": "config.json", "key": "rope_theta", "expected": "10000.0", "found": None}],
        "problems": ["rank-00: tensor 'x' is F32 [2], the original gives BF16 [2]"],
    }  # fmt: skip
    for place in document["forward"]["layers"][8:]:
        place |= {"error": 0.5, "ratio": 35.2, "is_same": False, "worst": "token 40"}
    first = document["forward"]["layers"][8]["name"]
    document["forward"] |= {"is_same": False, "first": first, "verdict": f"The error at '{first}' is 35.2 times"}
    return document


def only_bytes() -> dict[str, Any]:
    return same() | {"forward": None, "options": {"exact_only": True}}


def unchecked() -> dict[str, Any]:
    error = {"message": "/models/llama: no such folder", "hint": "give a folder"}
    summary = "It could not be checked: /models/llama: no such folder"
    return only_bytes() | {"exact": None, "verdict": "unchecked", "error": error, "summary": summary, "seconds": {}}


def by_own_plan() -> dict[str, Any]:
    """As a plan of the user's has it, in which little power is left."""
    document = same()
    lines = ["[config] rms_norm_eps is 1 on rank 0, built in 1e-05"]
    document["plan"] = {"name": "wrong.toml", "model_type": "phi3", "differences": lines}
    bias = {"bias_ratio": 0.77, "bias_place": "model.layers.2.self_attn.o_proj"}
    document["forward"]["power"] |= {"noise": 0.1737, "seen_from": 0.6949, "is_poor": True, **bias}
    return document


def not_finite() -> dict[str, Any]:
    """As ``--json`` writes it, and as Python has it."""
    document = different()
    places = document["forward"]["layers"]
    places[0] |= {"error": 0.0, "noise": 0.0, "ratio": 0.0}
    places[1] |= {"error": 1e-320, "noise": 1e300, "ratio": 1e-320}
    places[9] |= {"error": "inf", "ratio": "inf"}
    places[10] |= {"error": "nan", "noise": "nan", "ratio": "nan"}
    places[11] |= {"error": math.inf, "noise": math.nan, "ratio": -math.inf}
    document["forward"]["logits"] |= {"max_error": "nan", "kl": "inf", "histogram": []}
    return document


def hostile() -> dict[str, Any]:
    document = different()
    worst = HOSTILE[0]
    document |= {"original": worst, "shards": HOSTILE[1], "summary": HOSTILE[2], "notes": HOSTILE}
    document["exact"]["first"] |= {"tensor": worst, "file": HOSTILE[1], "original_file": HOSTILE[2]}
    document["exact"] |= dict.fromkeys(("missing", "extra", "problems"), HOSTILE)
    damage = {"rank": 0, "nbytes": 1, "elements": 1, "stored": None}
    document["exact"]["damages"] = [{"tensor": name, **damage} for name in HOSTILE]
    document["exact"]["configs"] = [{"file": n, "key": n, "expected": n, "found": n} for n in HOSTILE]
    document["forward"]["layers"] = [row(name, 0.1, 0.2, 0.5, i % 2 == 0) for i, name in enumerate(HOSTILE)]
    document["forward"]["gradients"] = copy.deepcopy(document["forward"]["layers"])
    document["forward"] |= {"verdict": worst, "unused": HOSTILE, "device": worst, "versions": {worst: worst}}
    document["environment"] = {worst: worst}
    document["plan"] = {"name": worst, "model_type": worst, "differences": HOSTILE}
    document["forward"]["power"] |= {"place": worst, "bias_place": worst, "bias_ratio": "nan", "is_poor": True}
    return document


def large() -> dict[str, Any]:
    """61 layers, and more weights than a plot has points or a table has lines."""
    document = different()
    document["forward"]["layers"] = forward(61)["layers"]
    weights = [row(f"model.layers.{i // 40}.mlp.experts.{i % 40}.weight", 0.1, 0.2, 0.5) for i in range(2440)]
    weights[2439] = row("model.layers.60.mlp.experts.39.weight", 0.9, 0.2, 4.5, False)
    document["forward"]["gradients"] = weights
    return document


DOCUMENTS = {f.__name__: f for f in (same, different, only_bytes, unchecked, by_own_plan, not_finite, hostile, large)}


# -------------------------------------------------------------------------------------------------- without a browser


class Reader(html.parser.HTMLParser):
    """Collects elements, their attributes, and text; checks that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] != "style":
            self.words.append(data)


ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "figure", "figcaption",
    "h1", "h2", "h3", "p", "dl", "dt", "dd", "ul", "li", "code", "span", "div", "table", "caption", "thead", "tbody",
    "tr", "th", "td", "svg", "g", "text", "line", "rect", "circle", "path", "polyline", "desc",
}  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
def test_nothing_in_it_can_run_or_reach_out(name: str) -> None:
    text = page(DOCUMENTS[name]())
    for tag, attributes in Reader(text).elements:
        assert tag in ALLOWED
        assert not {key for key in attributes if key.startswith("on")} | (attributes.keys() & {"src", "href", "style"})
    assert "url(" not in text and "@import" not in text and "<script" not in text
    policy = next(a["content"] for _, a in Reader(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none'; style-src 'sha256-")
    text.encode("utf-8")


def test_names_are_shown_as_they_are_and_what_acts_is_spelled() -> None:
    words = Reader(page(hostile())).words
    for name in HOSTILE:
        assert printable(name) in words, name
    assert printable("\x1b[31m\u202e\ud800é\n") == "\\x1b[31m\\u202e\\ud800é\n"


def test_what_it_says() -> None:
    text = "\n".join(Reader(page(different())).words)
    for expected in (
        "Different", "model.layers.2.mlp.gate_proj.weight", "[0, 7]", "2b be", "cb 3a", " at byte 66,256",
        "model.layers.2.mlp.down_proj", " ✗ the first that differs", "35.20", "5.00e-01", "96.88%", "1.13e-04",
        "rope_theta",
        "rank-00-of-02: model.norm.weight", "stray.safetensors", "tp 2", "gloo", "bfloat16; the exact run in float32",
        "2 × 32, seed 0", "2.7.1", "9.0", "vision.tower.weight",
    ):  # fmt: skip
        assert expected in text, expected
    assert text.count("the first that differs") == 1
    assert "Could not be checked" in "".join(Reader(page(unchecked())).words)
    assert "Forward" not in "".join(Reader(page(only_bytes())).words)


def test_it_says_whose_plan_and_how_small_a_fault_is_seen() -> None:
    text = "".join(Reader(page(by_own_plan())).words)
    for expected in (
        "The bytes were compared with wrong.toml. It differs from the built-in rules of the model type phi3.",
        "[config] rms_norm_eps is 1 on rank 0, built in 1e-05",
        "17.37% of the values of logits", "69.49% of the values",
        "would have a ratio of 0.77 or more, least at model.layers.2.self_attn.o_proj", "--compute-dtype float32",
    ):  # fmt: skip
        assert expected in text, expected
    text = "".join(Reader(page(same())).words)
    assert "1.49% of the values of logits" in text and "--compute-dtype float32" not in text and "A plan of" not in text


def test_long_lists_are_cut_but_what_differs_is_shown() -> None:
    text = page(large())
    words = "".join(Reader(text).words)
    assert "; 440 more lines are in --json" in words
    assert words.count("model.layers.60.mlp.experts.39.weight ✗ the first that differs") == 1
    assert text.count('class="place"') <= 2 * (2 * COLUMNS + 41)
    assert len(text) < 3_000_000


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0, "0"), (1.234e-5, "1.23e-05"), ("inf", "∞"), (-math.inf, "−∞"), ("nan", "not a number"), (None, "–")],
)
def test_numbers(value: float | str | None, shown: str) -> None:
    assert number(value) == shown


def test_ratios() -> None:
    assert [ratio(x) for x in (0.756, 35.2, 1234.5, 2e9, "inf")] == ["0.76", "35.20", "1,234", "2.00e+09", "∞"]


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(different()))
    write_report(file, page(same()))
    assert file.read_text(encoding="utf-8") == page(same())
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(CheckpointError, match="disk"):
        write_report(file, page(different()))
    assert file.read_text(encoding="utf-8") == page(same())
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---------------------------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The page and the document of one command."""
    root = tmp_path_factory.mktemp("real")
    zoo.save("mixtral", root / "full", torch.bfloat16)
    split(root / "full", root / "shards", tp=2)
    report = root / "report.html"
    done = command("verify", root / "full", root / "shards", "--backward", "--json", "--report", report)
    assert (done.returncode, done.stderr) == (0, "")
    return report, json.loads(done.stdout)


def test_json_has_all_that_the_page_has(real: tuple[Path, dict[str, Any]]) -> None:
    report, document = real
    line = f"reshard verify {report.parent}/full {report.parent}/shards --backward --json --report {report}"
    assert report.read_text(encoding="utf-8") == page(document, line)
    words = Reader(page(document)).words
    assert {"model.layers.1.mlp.experts", "model.layers.0.self_attn.q_proj.weight", "The same model"} <= {
        word.strip() for word in words
    }


# ---------------------------------------------------------------------------------------------------------- in browser


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, real: tuple[Path, dict[str, Any]]) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    for name, document in DOCUMENTS.items():
        write_report(root / f"{name}.html", page(document()))
    return {"real": real[0], **{name: root / f"{name}.html" for name in DOCUMENTS}}


PAGES = ["real", *DOCUMENTS]

CONTRAST = """(() => {
  const parse = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255));
                       return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
                        if (c.length < 4 || c[3] > 0) return c.slice(0, 3) } return [255, 255, 255] };
  const found = {};
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()) || !e.checkVisibility()) continue;
    const style = getComputedStyle(e);
    const [a, b] = [light(parse(e instanceof SVGElement ? style.fill : style.color).slice(0, 3)), light(behind(e))];
    const key = e.tagName + '.' + (e.getAttribute('class') || '');
    found[key] = Math.min(found[key] || 99, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return found })()"""


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1000, "light")], ids=["phone", "desk"])
def test_in_a_browser(name: str, width: int, scheme: str, chromium: Browser, files: dict[str, Path]) -> None:
    chromium.open(files[name], width=width, scheme=scheme)
    assert chromium.evaluate(browser.TEXTS_OUTSIDE) == []
    assert len(chromium.evaluate(browser.WIDTHS_OF_SECTIONS)) == 1 and chromium.evaluate(browser.TABLES_CUT) == 0
    found = chromium.evaluate("[innerWidth, document.documentElement.scrollWidth, document.body.scrollWidth]")
    assert found[0] == width and max(found) <= width
    parts = "[...document.querySelectorAll('p, dl, dd, h1, h2, h3, li, figure')]"
    assert (
        chromium.evaluate(f"{parts}.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 200))")
        == []
    )
    contrast = chromium.evaluate(CONTRAST)
    assert len(contrast) > 5 and {key: value for key, value in contrast.items() if value < 4.5} == {}
    dark = chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 23)"
    assert dark == (scheme == "dark")
    shown = "[...document.querySelectorAll('svg')].filter(s => s.checkVisibility()).map(s => s.getAttribute('class'))"
    assert set(chromium.evaluate(shown)) <= {"narrow" if width < 640 else "wide"}
    _assert_accessible(chromium)
    _assert_quiet(chromium, files[name])


def _assert_accessible(chromium: Browser) -> None:
    assert chromium.evaluate("document.documentElement.lang") == "en"
    assert chromium.evaluate("document.querySelectorAll('h1').length") == 1
    levels = chromium.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    assert chromium.evaluate("document.querySelectorAll('th:not([scope])').length") == 0
    assert chromium.evaluate("[...document.querySelectorAll('table')].every(t => t.caption)")
    pictures = "[...document.querySelectorAll('svg')]"
    assert chromium.evaluate(f"{pictures}.every(s => s.getAttribute('role') == 'img')")
    for name in ("title", "desc"):
        assert chromium.evaluate(f"{pictures}.every(s => s.querySelector(':scope > {name}').textContent.trim())")
    drawn = "line, circle, rect, path, polyline, text"
    attributes = f"[...document.querySelectorAll('svg :is({drawn})')].flatMap(e => [...e.attributes].map(a => a.value))"
    assert chromium.evaluate(f"{attributes}.filter(a => /nan|inf/i.test(a))") == []


def _assert_quiet(chromium: Browser, file: Path) -> None:
    """No console message, no error, no request but for the page itself, and nothing was run."""
    loud = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"}
    assert [e for e in chromium.events if e["method"] in loud] == []
    asked = [e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [file.as_uri()]
    assert chromium.evaluate("document.querySelectorAll('img, script, iframe, a, link').length") == 0
    assert chromium.evaluate("document.title").endswith(" · reshard")


def test_the_policy_forbids_scripts_and_requests(chromium: Browser, files: dict[str, Path], tmp_path: Path) -> None:
    """Were something to slip through the escaping, it would not run."""
    text = files["same"].read_text(encoding="utf-8")
    owned = "document.title = 'owned'"
    added = f"<script>{owned}</script><img src='http://127.0.0.1:9/x.png' onerror=\"{owned}\">"
    file = tmp_path / "changed.html"
    file.write_text(text.replace("<main>", f"<main>{added}"), encoding="utf-8")
    chromium.open(file)
    assert chromium.evaluate("document.title").startswith("The same model")
    said = json.dumps([e["params"] for e in chromium.events if e["method"] == "Log.entryAdded"])
    assert said.count("Content Security Policy") >= 2
    asked = [e["params"]["response"]["url"] for e in chromium.events if e["method"] == "Network.responseReceived"]
    assert not any(url.startswith("http") for url in asked)


def test_points_tell_their_numbers(chromium: Browser, files: dict[str, Path]) -> None:
    """By the mouse, and by a finger."""
    visible = """[...document.querySelectorAll('svg .tip')].filter(t => getComputedStyle(t).visibility == 'visible')
                 .map(t => t.textContent)"""
    for width, kind in ((1000, "wide"), (360, "narrow")):
        chromium.open(files["different"], width=width)
        assert chromium.evaluate(visible) == []
        middle = f"document.querySelectorAll('svg.{kind}')[0].querySelectorAll('g.place')[8].querySelector('.hit')"
        chromium.evaluate(f"{middle}.scrollIntoView({{block: 'center'}})")
        x, y = chromium.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({middle}.getBoundingClientRect())")
        if kind == "wide":
            chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        else:
            chromium.call("Emulation.setTouchEmulationEnabled", enabled=True)
            chromium.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
            chromium.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            chromium.evaluate("new Promise(done => setTimeout(done, 600))")
            chromium.call("Emulation.setTouchEmulationEnabled", enabled=False)
        numbers = "error 5.00e-01, noise 1.48e-02, ratio 35.20"
        assert chromium.evaluate(visible) == [f"model.layers.2.mlp.down_proj{numbers}"], kind


def test_on_paper(chromium: Browser, files: dict[str, Path]) -> None:
    """In a light scheme whatever the screen's is, and without boxes that one would have to scroll."""
    chromium.open(files["large"], scheme="dark", media="print")
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    boxes = "[...document.querySelectorAll('.scroll')].every(e => getComputedStyle(e).overflow == 'visible')"
    assert chromium.evaluate(boxes)
    assert min(chromium.evaluate(CONTRAST).values()) >= 4.5
