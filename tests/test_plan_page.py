"""The picture of a plan: what it draws is what the ranks hold, and how it looks in a real browser."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from reshard.commands.plan import PlanRequest, PossibleDegrees, possible_degrees
from reshard.formats.mesh import Mesh
from reshard.formats.notation.format_file import OWN
from reshard.mesh.plan import Degrees, Plan, make_plan
from reshard.model.model import Model
from reshard.pages.plan_page import plan_page
from reshard.placement.program_plan import plan_for
from reshard.source.access import Access
from reshard.transforms.opening import open_any
from tests import store
from tests.marks import thorough
from tests.support import LLAMA, command, write_checkpoint
from tests.verify import browser
from tests.verify.browser import Browser

CASES = {
    "llama": ("llama", {"tp": 4}),
    "phi3": ("phi3", {"tp": 4}),
    "mqa": ("llama", {"tp": 8}),
    "stages": ("deepseek_v3", {"tp": 2, "pp": 2}),
    "experts": ("mixtral", {"tp": 2, "ep": 2}),
    "biases": ("gpt_oss", {"tp": 2}),
    "whole": ("gpt2", {"tp": 1}),
}


def plan_named(name: str) -> Plan:
    model, degrees = CASES[name]
    source = open_any(store.checkpoint(model), Access())
    return plan_for(source.model, OWN, Degrees(**degrees))


def page_named(name: str) -> str:
    plan = plan_named(name)
    return plan_page(plan, f"a <b>{name}</b>", possible_of(plan.model))


def possible_of(model: Model) -> PossibleDegrees:
    """The degrees that a model can have."""
    return possible_degrees(make_plan(model, Mesh()), PlanRequest("model"))


PART = re.compile(
    r"<title>(?:padding with zeros, )?ranks? ([\d, ]+): "
    r"rows ([\d,]+) to ([\d,]+), columns ([\d,]+) to ([\d,]+)\n?([^\n<]*)"
)


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_is_what_the_ranks_hold(name: str) -> None:
    plan, drawn = plan_named(name), Counter[tuple[str, int]]()
    for ranks, top, bottom, left, right, tensor in PART.findall(page_named(name)):
        first, last, begin, end = (int(text.replace(",", "")) for text in (top, bottom, left, right))
        for rank in ranks.split(", "):
            drawn[tensor, int(rank)] += (last + 1 - first) * (end + 1 - begin)
    names = {tensor for tensor, _ in drawn} - {""}
    assert len(names) > 5
    drawn_kinds = (kind for kind in plan.laid if kind.name in names and len(plan.laid[kind].full) <= 2)
    for kind in drawn_kinds:
        layout, times = plan.laid[kind], set[float]()
        for rank, box in layout.boxes.items():
            held = 1
            for dim, runs in enumerate(box.dims):  # padding is drawn apart
                held *= sum(max(0, min(run.end, layout.full[dim]) - run.offset) for run in runs)
            times.add(drawn[kind.name, rank] / held)
        assert len(times) == 1 and times <= {1.0, 2.0}, kind.name  # like tensors may stand in layers of two kinds


def test_what_it_says() -> None:
    text = page_named("phi3")
    assert "a &lt;b&gt;phi3&lt;/b&gt; on 4 ranks, tp 4" in text and "<b>" not in text
    assert re.findall(r'class="part">(\w+)<', text) == ["q", "k", "v", "gate", "up"]
    assert text.count("⊕ all-reduce, ") == 3 and "padding with zeros" in text and "on every rank" in text
    assert "Layers 0 to 2" in text
    stages = page_named("stages")
    assert "Pipeline stages" in stages and "stage 1" in stages and "Layers 1 to 2" in stages
    assert "Layers 1 to 2, as on stage 0" in stages and stages.count("on every rank of a stage") == 1
    assert "all-reduce, " not in page_named("whole")
    shared = page_named("mqa")
    assert "on ranks 0, 1" in shared and shared.count(", parts on 2 ranks") == 2  # keys and values


def drawn(name: str, block: str) -> list[str]:
    """The weights and marks of a block, in the order in which they are drawn."""
    text = page_named(name).partition(f"<h3>{block}")[2].partition("<h3>")[0]
    marks = re.findall(r'class="name">([^<]*)<|class="arrow"[^>]*>([^<]*)<|class="(reduce)"', text)
    return [next(filter(None, found)) for found in marks]


def test_the_order_is_that_of_a_token() -> None:
    """Attention before experts, norms before what they feed, what is summed last, whatever the rules' own order."""
    assert drawn("stages", "Before the layers") == ["model.embed_tokens", "reduce"]
    assert drawn("stages", "After the layers") == ["model.norm", "lm_head"]
    attention = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"]
    assert drawn("stages", "Layer 0") == [
        "input_layernorm", "x →", *(f"self_attn.{name}" for name in attention), "→", "self_attn.o_proj", "reduce",
        "post_attention_layernorm", "x →", "mlp.gate_proj", "mlp.up_proj", "→", "mlp.down_proj", "reduce",
    ]  # fmt: skip
    assert drawn("experts", "Layers 0 to 2")[-9:] == [
        "post_attention_layernorm", "x →", "block_sparse_moe.gate", "6 experts",
        *(f"block_sparse_moe.experts.{{expert}}.w{i}" for i in (1, 3)), "→",
        "block_sparse_moe.experts.{expert}.w2", "reduce",
    ]  # fmt: skip
    assert "3 on ranks 0, 1; 3 on ranks 2, 3" in page_named("experts")


def test_experts_are_drawn_on_all_their_ranks() -> None:
    """Each of ranks 0 to 3 has a part of an expert, of its own set of ranks; an all-reduce is in its weight's step."""
    text = page_named("experts")
    found = {(ranks, tensor.split(".")[-2]) for ranks, *_, tensor in PART.findall(text) if ".experts." in tensor}
    assert found == {(str(rank), f"w{i}") for rank in range(4) for i in (1, 2, 3)}
    assert text.count("⊕ all-reduce, ") == len(re.findall(r'</figure><span class="reduce">', text)) == 3
    model = open_any(store.checkpoint("mixtral", experts=9), Access()).model
    assert (
        plan_page(plan_for(model, OWN, Degrees(tp=1, ep=9)), "many", possible_of(model)).count(
            ", drawn for 8 of 9 sets of ranks"
        )
        == 3
    )


def test_a_tower_has_layers_of_its_own() -> None:
    """They are on every rank, and none of the language model's."""
    plan = plan_for(open_any(store.checkpoint("qwen3_vl"), Access()).model, OWN, Degrees(tp=2))
    found = re.findall(r"<h3>([^<]*)<", plan_page(plan, "tower", possible_of(plan.model)))
    assert found[:2] == ["Before the layers", "Layers 0 to 2"] and found[-1] == "After the layers"
    assert found[2].startswith("model.visual.blocks 0")


def test_a_bias_of_experts_is_not_summed() -> None:
    """It has two dimensions, and the second is cut: it is a column-parallel weight's."""
    found = drawn("biases", "Layers 0 to 2")
    assert found.count("reduce") == 2 and found[-4:-1] == ["→", "mlp.experts.down_proj", "reduce"]
    assert "expert column · 6x80 " in page_named("biases")


def test_the_shape_on_each_rank(tmp_path: Path) -> None:
    """22 rows of an MLP on 8 ranks: the last has 1, the others have 3."""
    config = {**LLAMA, "hidden_size": 24, "intermediate_size": 22}
    source = open_any(write_checkpoint(tmp_path / "model", config=config), Access())
    plan = plan_for(source.model, OWN, Degrees(tp=8, uneven=True))
    text = plan_page(plan, "uneven", possible_of(plan.model))
    assert all(
        f"up_proj.weight\nff hidden\n22x24; {1 if rank == 7 else 3}x24 on rank {rank}<" in text for rank in range(8)
    )


def test_command(tmp_path: Path) -> None:
    source, file = store.checkpoint("llama"), tmp_path / "plan.html"
    done = command("plan", source, "--tp", "2", "--report", file)
    assert done.returncode == 0 and done.stderr == f"Drew the plan: {file}\n" and "bytes per rank" in done.stdout
    text = file.read_text()
    assert "attention heads do not divide by 3" in text and "reshard plan " in text.partition("<footer")[2]
    assert '<th scope="col">--tp</th><th scope="col">possible</th>' in text  # its numbers are at the left, too
    for arguments in (("--report", file), ("--tp", "2", "--as", "vllm", "--report", file)):
        assert "--report goes with" in command("plan", source, *arguments).stderr
    missing = tmp_path / "none" / "plan.html"
    assert "there is no folder" in command("plan", source, "--tp", "2", "--report", missing).stderr


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
@thorough
def test_in_a_browser(name: str, width: int, scheme: str, chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    file.write_text(page_named(name), encoding="utf-8")
    chromium.open(file, width=width, scheme=scheme)
    assert max(chromium.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth]")) <= width
    asked = [e["params"]["request"]["url"] for e in chromium.events if e["method"] == "Network.requestWillBeSent"]
    assert asked == [file.as_uri()]
    assert not [e for e in chromium.events if e["method"] in {"Runtime.exceptionThrown", "Log.entryAdded"}]
    boxes = "[...document.querySelectorAll('.weight svg')].map(s => s.getBoundingClientRect())"
    sizes = chromium.evaluate(f"{boxes}.map(r => [r.width, r.height])")
    assert len(sizes) > 5 and all(min(size) >= 5 and size[0] <= width for size in sizes)
    assert chromium.evaluate(browser.TEXTS_OUTSIDE) == []
    assert len(chromium.evaluate(browser.WIDTHS_OF_SECTIONS)) == 1 and chromium.evaluate(browser.TABLES_CUT) == 0
    fills = "[...document.querySelectorAll('rect.cell')].map(r => getComputedStyle(r).fill)"
    assert all(fill.startswith(("rgb", "hsl", "url")) for fill in chromium.evaluate(fills))
    known = "[...document.querySelectorAll('pattern')].map(p => p.id)"
    used = {found[1] for fill in chromium.evaluate(fills) if (found := re.search(r"#([\w-]+)", fill))}
    assert used <= set(chromium.evaluate(known))


WRAPPED = """
    [...document.querySelectorAll('.flow')].flatMap(flow => {
        const style = getComputedStyle(flow), items = [...flow.children].map(e => [e, e.getBoundingClientRect()]);
        const right = flow.getBoundingClientRect().right - parseFloat(style.paddingRight);
        return items.slice(1).map(([e, box], i) => [e, box, items[i][1]])
            .filter(([e, box, before]) => box.left < before.right)
            .map(([e, box, before]) => [e.textContent, right - before.right - parseFloat(style.columnGap) - box.width]);
    })"""
"""Of each row what begins a new line, and how much room it would have had in the line before."""


@pytest.mark.parametrize("name", CASES)
@thorough
def test_what_fits_lies_in_one_row(name: str, chromium: Browser, tmp_path: Path) -> None:
    """A layer of Llama is two rows on a usual screen: a token's way through attention, and through the MLP."""
    file = tmp_path / "plan.html"
    file.write_text(page_named(name), encoding="utf-8")
    for width in (400, 1280, 1400):
        chromium.open(file, width=width)
        wrapped = chromium.evaluate(WRAPPED)
        assert all(room < 1 for _, room in wrapped), wrapped
        if name in {"llama", "mqa"} and width > 400:
            assert wrapped == []
    ends = "[...document.querySelectorAll('.arrow')].filter(a => !a.nextElementSibling).length"
    assert chromium.evaluate(ends) == 0  # an arrow is in the line of what it leads to
