"""``reshard live``: a push between processes to look at, and the check of a plan with an engine's own loader."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from reshard.cli.options import PATH, PLACE, RANKS, Command, Group, Option
from reshard.cli.printing import print_answer
from reshard.text import align, human_bytes, plural


@click.command(
    "live",
    cls=Command,
    examples={
        "reshard live demo": "two processes train, three receive: bytes, seconds, and whether all is exact",
        "reshard live demo --json": "the same as JSON",
        "reshard live check meta-llama/Llama-3.1-8B --to vllm:tp4": "whether vLLM's own loader agrees with the rules",
    },
    options=(
        Option("--to", "receiver", group=Group.WHAT, type=RANKS, metavar="WHO",
               help="The engine and its degrees, such as vllm:tp4."),
        Option("--engine-python", "python", group=Group.HOW, type=PATH, metavar="FILE",
               help="The Python that has vLLM, and reshard."),
    ),
)  # fmt: skip
@click.argument("what", type=click.Choice(["demo", "check"]))
@click.argument("source", type=PLACE, required=False)
def live_command(what: str, source: str | None, receiver: str | None, python: Path | None, as_json: bool) -> bool:
    """Try a push between running processes, or check one before there is any.

    'demo' trains in two processes and pushes to three. 'check' asks vLLM's own loader, in its environment on a CPU and
    without weights, where each element belongs, and compares that with the rules. To push from a program, see
    'help(reshard.live)' in Python.

    Exit code 0: all is exact, or both agree. 1: not.
    """
    if what == "demo":
        if source is not None or receiver is not None or python is not None:
            raise click.UsageError("demo goes without SOURCE, --to and --engine-python")
        return _demo(as_json)
    if source is None or receiver is None:
        raise click.UsageError("check goes with SOURCE and --to: reshard live check SOURCE --to vllm:tp4")
    return _check(source, receiver, python, as_json)


def _demo(as_json: bool) -> bool:
    import socket

    from reshard.cli.demo import CONFIG, write_model
    from reshard.live import demo

    with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free
        store = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    sizes = {"hidden_size": 192, "intermediate_size": 528, "num_attention_heads": 6, "num_key_value_heads": 3}
    with tempfile.TemporaryDirectory(prefix="reshard-live-") as folder:
        reports = demo.run(write_model(Path(folder) / "model", CONFIG | sizes), store)
    trainers, receivers = reports[: demo.TRAINERS], reports[demo.TRAINERS :]
    first, exact = trainers[0], all(all(r["exact"]) for r in receivers)
    document = {
        "to": demo.TARGET, "exact": exact, "steps": first["steps"], "sent": [r["sent"] for r in trainers],
        "received": [r["received"] for r in receivers], "seconds": first["seconds"],
        "gathered_bytes": first["gathered"] * (len(reports) - 1), "gathered_seconds": first["gather_seconds"],
    }  # fmt: skip
    cells = [("", "sends", "receives")]
    cells += [(f"trainer {i}", human_bytes(r["sent"]), "") for i, r in enumerate(trainers)]
    cells += [(f"receiver {i}", "", human_bytes(r["received"])) for i, r in enumerate(receivers)]
    total, gathered = human_bytes(sum(document["sent"])), human_bytes(document["gathered_bytes"])
    words = ["exact" if all(each) else "DIFFERENT" for each in zip(*(r["exact"] for r in receivers), strict=True)]
    rows = [
        ("", "bytes", "time", ""),
        ("push 1", total, f"{first['seconds'][0]:.3f} s", words[0]),
        ("push 2, after a training step", total, f"{first['seconds'][1]:.3f} s", words[1]),
        ("the same by gather and broadcast", gathered, f"{first['gather_seconds']:.3f} s", ""),
    ]
    head = f"A Llama with random weights: two processes train (FSDP2), three hold what {demo.TARGET} has"
    print_answer(
        as_json, document, head, "", *align(cells, right=(1, 2), width=None), "", *align(rows, right=(1, 2), width=None)
    )
    return exact


def _check(source: str, receiver: str, python: Path | None, as_json: bool) -> bool:
    import sys

    from reshard.live.meshes import target_of
    from reshard.live.vllm_check import check

    target = target_of(receiver)
    if target.program != "vllm" or target.pp > 1 or target.ep not in (1, target.tp):
        raise click.UsageError("--to names vLLM on ranks of tp: vllm:tp4, or vllm:tp4ep4 with experts over them")
    lines = check(source, target, python=str(python or sys.executable))
    document = {"source": source, "to": str(target), "agree": not lines, "differences": lines}
    agreed = f"{source}: vLLM's own loader and the rules agree on each element of {plural(target.tp, 'rank')}"
    print_answer(as_json, document, *(lines or [agreed]))
    return not lines
