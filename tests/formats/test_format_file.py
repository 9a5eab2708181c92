"""The file of a program's format: an unknown key anywhere, or a value of another kind, is an error that names it."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation import format as format_module
from reshard.formats.notation import format_file
from reshard.formats.notation.format import CutRule, Format, Pattern, Use
from reshard.formats.notation.format_file import format_of, read_format

LEAST = 'loaded_by = "a program"\nload = "it {out}"\nfiles = "model-{rank}.safetensors"\n'
RIGHT = [
    'pad_vocabulary_to = "128 * tp"',
    'files = { name = "a-{rank}.pt", pp = "b-{pp}-{tp}.pt" }',
    'engine = "vllm"\nengine_format = "sharded_state"',
    '[tensors]\n"a.*" = "b.*"',
    '[tensors]\n"a.*" = { from = "b.*", cut = 0 }',
    '[tensors]\n"a.*" = [{ from = "b.*", cut = 0 }, { from = "c.*" }]',
    '[tensors]\n"a.*" = { from = "b.*", on = "first rank" }\n"b.*" = { from = "b.*", on = { last = "c" } }',
    '[tensors]\n"a.{layer}.*" = { from = "b.{layer}.{expert}.*", share = [1, 2] }',
    '[tensors]\n"a.{layer}" = { from = "b.{layer}", shift = 1 }',
    '[names]\n"a.*" = { to = "b.*", when = "x" }',
    '[models."x, y".tensors]\n"a.*" = "b.*"\n[models.x.dropped]\n"c.*" = {}',
    '[dropped]\n"a.*" = { beyond = "x" }',
    '[refused]\n"a.*" = { why = "it cannot" }',
    '[stacks]\n"a.{layer}.*" = { to = "a.*" }',
    '[further]\n"a.{layer}.*" = { to = "b.{further}.*", beyond = "x" }',
    '[[constants]]\nbeside = "a.*"\nnames = ["a.*"]\ndtype = "F32"\nvalue = 1.0',
    '[config]\nfile = "params.json"\nwrite = { dim = "hidden_size" }\nread = { hidden_size = "dim" }',
]
WRONG = [
    ('[tensors]\n"a.*" = { from = "b.*", cut = true }', "'a.*'.cut.dim should be a whole number from 0 on and is true"),
    ('[tensors]\n"a.*" = { from = "b.*", cut = { dim = 0, part = 3 } }', "'a.*'.cut: unknown key 'part'"),
    ('[tensors]\n"a.*" = { from = "b.*", on = "rank 3" }', "'a.*'.on should be 'first rank' or a table"),
    ('[tensors]\n"a.*" = { from = "b.*", on = { middle = "c" } }', "'a.*'.on: unknown key 'middle'"),
    ('[tensors]\n"a" = { from = "b.{expert}", share = [2, 2] }', "'a': 'share' should be a number and a count"),
    ("padd = 3", "unknown key 'padd' (known: "),
    ('[models.x.tensors]\n"a.*" = { from = "b.*", cuts = 0 }', "'a.*': unknown key 'cuts'"),
    ('[models.x.demands]\n"x" = "it must"', "models.x: unknown key 'demands'"),
    ("models = { x = 3 }", "models.x should be"),
    ("[models.x]\ntensors = 3", "models.x.tensors should be"),
    ("[models.x]\nconstants = [3]", "models.x.constants[0] should be"),
    ('[models."x,".names]\n"a.*" = "b.*"', "'x,' names a model type without a name"),
    ('[models.x.tensors]\n"a.*" = { from = "b.*", when = [] }', "'a.*'.when should be"),
    ('[models.x.tensors]\n"a.*" = { from = "b.*", when = "" }', "'a.*'.when: '' is not an expression"),
    ("chunks = 1", "chunks should be true or false and is 1"),
    ('pad_vocabulary_to = "vocab"', "pad_vocabulary_to: 'vocab' should be over size and tp"),
    ('files = { name = "a", stage = "b" }', "files: unknown key 'stage'"),
    ("engine = 3", "engine should be a text and is 3"),
    ('[tensors]\n"a.*" = { from = "b.*", cuts = 0 }', "'a.*': unknown key 'cuts'"),
    ('[tensors]\n"a.*" = [{ from = "b.*" }, { from = "b.*", cuts = 0 }]', "'a.*': unknown key 'cuts'"),
    ('[tensors]\n"a.*" = { cut = 0 }', "'a.*' has no 'from'"),
    ('[names]\n"a.*" = { to = "b.*", if = "x" }', "'a.*': unknown key 'if'"),
    ('[dropped]\n"a.*" = { above = "x" }', "'a.*': unknown key 'above'"),
    ('[refused]\n"a.*" = { why = "it cannot", scalar = true }', "'a.*': unknown key 'scalar'"),
    ('[stacks]\n"a.{layer}.*" = { to = "a.*", of = "x" }', "'a.{layer}.*': unknown key 'of'"),
    (
        '[further]\n"a.{layer}.*" = { to = "b.{further}.*", beyond = "x", why = "y" }',
        "'a.{layer}.*': unknown key 'why'",
    ),
    (
        '[[constants]]\nbeside = "a.*"\nnames = ["a.*"]\ndtype = "F32"\nvalue = 1.0\nshaped = []',
        "constants[0]: unknown key 'shaped'",
    ),
    ('[config]\nfile = "params.json"\nwrite = {}\nread = {}\nmore = {}', "config: unknown key 'more'"),
]


def _format(tmp_path: Path, text: str) -> Format:
    least = "".join(f"{line}\n" for line in LEAST.splitlines() if not text.startswith(line.split(" = ")[0]))
    (tmp_path / "mine.toml").write_text(least + text + "\n")
    return read_format(tmp_path / "mine.toml")


@pytest.mark.parametrize("text", RIGHT)
def test_what_a_file_may_say(text: str, tmp_path: Path) -> None:
    assert _format(tmp_path, text).name == "mine"


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_no_file_says_is_named(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=re.escape(f"mine.toml: {message}")):
        _format(tmp_path, text)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"line": []}, "unknown key 'line'"),
        ({"lines": [{"types": ["a"], "tensors": {"a.*": {"from": "b.*", "cuts": 0}}}]}, "'a.*': unknown key 'cuts'"),
        ({"refused": [{"types": ["a"], "reason": "x"}]}, "refused[0] has no 'why'"),
        ({"seen": [{"types": ["a"], "tensors": {}, "count": 1}]}, "seen[0]: unknown key 'count'"),
    ],
)
def test_what_no_table_of_types_says_is_named(table: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(LEAST)
    assert read_format(tmp_path / "mine.toml", {"lines": []}).rules.lines == ()
    with pytest.raises(PlanError, match=re.escape(message)):
        read_format(tmp_path / "mine.toml", table)


def test_a_table_of_names_says_one_for_each_kind_of_mesh(tmp_path: Path) -> None:
    files = _format(tmp_path, 'files = { name = "a-{rank}.pt", pp = "b-{pp}-{tp}.pt", folder = "in" }').files
    assert files.name_of(Mesh((("tp", 2),)), 1, 0) == "in/a-1.pt"
    assert files.name_of(Mesh((("pp", 2), ("tp", 2))), 3, 0) == "in/b-1-1.pt"


@pytest.mark.parametrize(
    ("text", "sizes", "tp", "multiple"),
    [
        ("", (1000,), 4, 1),
        ('pad_vocabulary_to = "0"', (1000,), 4, 0),
        ('pad_vocabulary_to = "64"', (1000, 2000), 3, 64),
        ('pad_vocabulary_to = "128 * tp"', (1000,), 4, 512),
        ('pad_vocabulary_to = "64 if size % tp == 0 else 64 * tp"', (1000, 1002), 4, 256),
        ('pad_vocabulary_to = "64"', (), 4, 1),
    ],
)
def test_what_the_vocabulary_is_padded_to(
    text: str, sizes: tuple[int, ...], tp: int, multiple: int, tmp_path: Path
) -> None:
    assert _format(tmp_path, text).padding.multiple(sizes, tp) == multiple


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("false", CutRule()),
        ('"hidden"', CutRule(axis="hidden")),
        ("1", CutRule(dim=1)),
        ("0", CutRule(dim=0)),
        ("{ dim = 0, parts = 3 }", CutRule(dim=0, parts=3)),
    ],
)
def test_where_a_line_is_cut(text: str, cut: CutRule, tmp_path: Path) -> None:
    (line,) = _format(tmp_path, f'[tensors]\n"a.*" = {{ from = "b.*", cut = {text} }}').rules.lines
    assert line.cut == cut


def test_what_holds_for_a_model_type_goes_before_what_holds_for_all(tmp_path: Path) -> None:
    lines = '[tensors]\n"a.*" = "b.*"\n[models."x, y".tensors]\n"a.*" = { from = "b.*", when = "p", cut = 0 }\n'
    (tmp_path / "new.toml").write_text(f'{LEAST}{lines}[models.z.names]\n"a.*" = "c.*"\n')
    rules = read_format(tmp_path / "new.toml").rules
    first, second = rules.lines
    assert first.when is not None and second.when is None and second.cut is None
    cases = (({"model_type": "y", "p": 1}, True), ({"model_type": "z", "p": 1}, False), ({"model_type": "x"}, False))
    for settings, holds in cases:
        assert bool(first.when.evaluate({"p": 0, **settings}.__getitem__)) is holds
    (name,) = rules.names
    assert name.when is not None and name.when.evaluate({"model_type": "z"}.__getitem__)


def test_threads_share_what_covers_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer and a receiver may plan in two threads of one process: the second asks while the first collects."""
    name, rules, match = "model.layers.0.mlp.gate_proj.weight", replace(format_of("vllm").rules), Pattern.match
    others = list[Sequence[Use]]()

    def asked_meanwhile(self: Pattern, text: str) -> object:
        if threading.current_thread() is threading.main_thread() and not others:
            with ThreadPoolExecutor(1) as pool:
                others.append(pool.submit(rules.uses, name).result())
        return match(self, text)

    monkeypatch.setattr(Pattern, "match", asked_meanwhile)
    assert [*map(id, rules.uses(name))] == [*map(id, others[0])] != []


def test_threads_share_a_format_and_that_of_a_model_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_file, "READ", {})
    barrier, read = threading.Barrier(2), format_file.read_format

    def both_read(path: Path) -> Format:
        barrier.wait(10)
        return read(path)

    monkeypatch.setattr(format_file, "read_format", both_read)
    with ThreadPoolExecutor(2) as pool:
        one, another = pool.map(format_of, ["vllm", "vllm"])
    assert one is another

    def both_narrow(config: Mapping[str, object]) -> bool:
        barrier.wait(10)
        return False

    monkeypatch.setattr(format_module, "is_headless", both_narrow)
    with ThreadPoolExecutor(2) as pool:
        one, another = pool.map(one.of, [{"model_type": "llama"}] * 2)
    assert one is another


def test_any_rule_may_be_of_some_model_types_alone(tmp_path: Path) -> None:
    rules = _format(tmp_path, '[models.x.refused]\n"a.*" = "it cannot"\n[refused]\n"b.*" = { why = "nor this" }').rules
    assert [(rule.old.text, rule.why, rule.when and rule.when.text) for rule in rules.refusals] == [
        ("a.*", "it cannot", "model_type == 'x'"), ("b.*", "nor this", None),
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"models\.x: unknown key 'keep'"):
        _format(tmp_path, "[models.x]\nkeep = true")
