"""Damages what the commands read and runs them: each answers, refuses in one short line, and touches nothing else.

``python -m tests.fuzz --seconds 600`` runs until the time is over; a failure shows the seed that makes it again, with
``--seed N --runs 1``. ``tests/test_fuzz.py`` runs the first seeds.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.cli.commands import main as reshard
from reshard.formats.files.delta import digest
from reshard.formats.files.safetensors import build_header, read_header, tensor_bytes
from tests.support import LLAMA, change_tensor, llama_tensors, write_checkpoint

SECONDS = 10.0
"""What one command may take of the processor: that others use it, too, is no fault of the command's."""
WAIT = 300.0
"""After how many seconds on the clock a command is waiting for something that does not come."""
MEMORY = 1 << 30
"""Bytes that one command may need."""
LONGEST = 1000
"""Characters of a line on stderr."""


class Raw(str):
    """Text that stands in JSON as it is, without quotes."""


def _nested(depth: int) -> Raw:
    return Raw("[" * depth + "]" * depth)


VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    3,
    1.5,
    0.0,
    1e18,
    1e308,
    -1e308,
    2**31,
    2**63,
    10**12,
    10**18,
    "",
    "1",
    "x",
    [],
    {},
    Raw("Infinity"),
    Raw("-Infinity"),
    Raw("NaN"),
    Raw("1e999"),
    Raw("9" * 4000),
    Raw("9" * 5000),
    Raw("-" + "9" * 4000),
    "\ud800",
    "x" * 200_000,
    "two\nlines \x1b[31m\x07\x00",
    "../../outside",
    "/etc/passwd",
    "²",
    "9" * 5000,
    "\udcff",
    "re:(a+)+$",
    "model",
    [1, 2],
    [0, 0],
    ["a", None],
    [[]],
    {"a": 1},
    {"tp": 2},
    {"0": {}},
    [1] * 1000,
    _nested(90),
    _nested(400),
    _nested(700),
    _nested(100_000),
    Raw('{"a":' * 700 + "1" + "}" * 700),
)
KEYS = ("\ud800", "x" * 100_000, "", "²", "name", "a.b", "model.layers.²", "model.layers." + "9" * 5000, "\x1b[2J\n")
CONFIG_KEYS = (
    *LLAMA,
    "quantization_config",
    "quantization",
    "quantize",
    "text_config",
    "compression_config",
    "layer_types",
    "torch_dtype",
    "head_dim",
    "model_type",
    "architectures",
)
QUANTIZATION: tuple[dict[str, Any], ...] = tuple(
    {"quant_method": method, **more}
    for method, more in [
        ("gptq", {"bits": 4, "group_size": 8, "desc_act": False, "dynamic": {"-:x": {}}}),
        ("awq", {"bits": 4, "group_size": 8, "version": "gemm"}),
        ("fp8", {"weight_block_size": [4, 4]}),
        ("auto-round", {"bits": 4, "extra_config": {"model.layers.0": {"bits": 8}}, "packing_format": "auto_gptq"}),
        (
            "compressed-tensors",
            {
                "format": "pack-quantized",
                "config_groups": {
                    "group_0": {"targets": ["Linear", "re:.*down"], "weights": {"num_bits": 4, "group_size": 8}}
                },
            },
        ),
        ("modelopt", {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "quantized_layers": {"a": {}}}}),
        ("quark", {"global_quant_config": {"weight": {"qscheme": "per_group", "group_size": 32}}}),
        ("bitsandbytes", {}),
        ("mxfp4", {}),
        ("bitnet", {}),
        ("unheard", {}),
    ]
)
EXPRESSIONS = (
    "'a' * 3000000000",
    "[0] * 500000000",
    "'%1999999999d' % 1",
    "sum([1] * 100000000)",
    "-" * 5000 + "1",
    "(" * 3000 + "1" + ")" * 3000,
    "not " * 3000 + "1",
    "1e308",
    "1e308 * 10",
    "9" * 4000,
    "9" * 5000,
    "hidden_size * " * 500 + "1",
    "hidden_size * 1.5",
    "hidden_size / 0",
    "hidden_size % 0",
    "int('9' )",
    "int(1e308)",
    "int(1e999)",
    "max()",
    "len(1)",
    "'\\ud800'",
    "\ud800",
    "\x00",
    "x.y.z",
    "layer_types[layer]",
    "1 if 1 else",
    "lambda: 1",
    "head",
    "group + group",
    "[[]] * 2",
    "",
    " ",
    "None",
    "True",
    "-1",
    "0",
    "1" + " + 1" * 400,
    "x" * 5000,
    "'x' in 'x'",
    "x[1:2]",
    "f'{1}'",
    "1 is 1",
    "len('a' * 9)",
)
SHAPES = (
    "(" * 3000,
    "(" * 900 + "ff" + ")" * 900,
    "9" * 5000 + " hidden",
    "9" * 4000,
    "hidden",
    "ff hidden",
    "hidden ff",
    "...",
    "hidden/0",
    "hidden/" + "9" * 4000,
    "hidden*9/7 1",
    "->",
    "",
    "(ff + ff) hidden",
    "(ff ff)",
    "x" * 50_000,
    "(a: ff",
    "\ud800",
    "²",
    "(ff 1) (1 hidden)",
)


# ------------------------------------------------------------------------------------------------------- documents


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a document."""
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(document: Any, chance: random.Random) -> Any:
    """A document with one value replaced, removed, renamed or added."""
    document = copy.deepcopy(document)
    path = chance.choice(list(places(document)) or [()])
    if not path:
        return chance.choice(VALUES)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    kind = chance.random()
    if kind < 0.7:
        inner[path[-1]] = chance.choice(VALUES)
    elif kind < 0.8:
        del inner[path[-1]]
    elif kind < 0.9 and isinstance(inner, dict):
        inner[chance.choice(KEYS)] = inner.pop(path[-1])
    elif isinstance(inner, dict):
        inner[chance.choice(KEYS)] = chance.choice(VALUES)
    else:
        inner.insert(0, chance.choice(VALUES))
    return document


def text_of(document: Any) -> str:
    """JSON, with ``Raw`` text in it as it is."""
    raw: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, Raw):
            raw.append(value)
            return f"@raw{len(raw) - 1}@"
        if isinstance(value, dict):
            return {key: mark(item) for key, item in value.items()}
        return [mark(item) for item in value] if isinstance(value, list) else value

    text = json.dumps(mark(document))
    for number, token in enumerate(raw):
        text = text.replace(f'"@raw{number}@"', token)
    return text


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Bytes of a file, damaged without knowing what they mean."""
    place = chance.randrange(len(content) + 1)
    return chance.choice(
        [
            lambda: content[:place],
            lambda: content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :],
            lambda: (
                content[:place]
                + chance.choice([b"\0", b"\xff\xfe", b'"', b"[" * 5000, b"{", b",", b"\n"])
                + content[place:]
            ),
            lambda: content + content,
            lambda: b"",
            lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.decode("utf-8", "replace").encode("utf-16"),
            lambda: content.replace(b"1", b"7"),
            lambda: content.replace(b"null", b"NaN"),
        ]
    )()


# ------------------------------------------------------------------------------------------------------- mutations


def _change_json(path: Path, chance: random.Random) -> str:
    document = json.loads(path.read_bytes())
    if path.name == "config.json" and chance.random() < 0.6:
        key = chance.choice(CONFIG_KEYS)
        document[key] = chance.choice(VALUES)
        if "quant" in key and chance.random() < 0.8:
            document[key] = changed(chance.choice(QUANTIZATION), chance)
    else:
        document = changed(document, chance)
    text = text_of(document)
    if path.name == "delta.json" and chance.random() < 0.9:
        with suppress(ValueError):
            named = {key: value for key, value in json.loads(text).items() if key != "digest"}
            text = json.dumps(named | {"digest": digest(named)})
    path.write_text(text)
    return f"a value of {path}"


def _change_bytes(path: Path, chance: random.Random) -> str:
    path.write_bytes(damaged(path.read_bytes(), chance))
    return f"bytes of {path}"


def _change_header(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    document = json.loads(content[8:end])
    metadata = document.get("__metadata__", {})
    if "reshard" in metadata and chance.random() < 0.7:
        metadata["reshard"] = text_of(changed(json.loads(metadata["reshard"]), chance))
    elif chance.random() < 0.15:
        document["__metadata__"] = {**metadata, "reshard": chance.choice(["", "[]", "{", "1", "null", "[" * 5000])}
    else:
        document = changed(document, chance)
    text = text_of(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    return f"header of {path}"


def _change_data(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    at = chance.randrange(8 + int.from_bytes(content[:8], "little"), len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)
    return f"byte {at} of {path}"


def _change_plan(path: Path, chance: random.Random) -> str:
    lines = path.read_text().splitlines()
    place = chance.randrange(len(lines))
    name, _, old = lines[place].partition(" = ")
    kind = chance.random()
    if kind < 0.15:
        lines[place] = chance.choice(
            [
                "[" * 5000,
                "a" + ".a" * 5000 + " = 1",
                "x = " + "[" * 3000,
                "[tensors]",
                '"',
                "x = " + "9" * 5000,
                "x = inf",
            ]
        )
    elif kind < 0.25:
        del lines[place]
    elif kind < 0.35:
        lines[place] = f"{json.dumps(chance.choice(KEYS))} = {old}"
    elif kind < 0.5:
        lines[place] = (
            f"{name} = {chance.choice(['1', '1.5', 'nan', 'true', '[]', '[1]', '{}', '1979-05-27', '[[1]]', '[[]]'])}"
        )
    elif kind < 0.6:
        lines[place] = f"{name} = {{ when = {json.dumps(chance.choice(EXPRESSIONS))}, shape = {old} }}"
    else:
        lines[place] = f"{name} = {json.dumps(chance.choice((*EXPRESSIONS, *SHAPES)))}"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")
    return f"line {place + 1} of {path}"


def _change_kind(path: Path, chance: random.Random) -> str:
    path.unlink()
    kind = chance.choice(["fifo", "folder", "loop", "nowhere", "zero", "full", "null", "socket", "sparse", "none"])
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(6 << 30)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            here = Path.cwd()
            os.chdir(path.parent)  # the name of a socket has at most 108 bytes
            listener.bind(path.name)
            os.chdir(here)
    elif kind != "none":
        targets = {
            "loop": path.name,
            "nowhere": "not-there",
            "zero": "/dev/zero",
            "full": "/dev/full",
            "null": "/dev/null",
        }
        path.symlink_to(targets[kind])
    return f"{path} is a {kind}"


def _change_name(path: Path, chance: random.Random) -> str:
    names = [
        b"caf\xff" + os.fsencode(path.suffix),
        b"x" * 240 + os.fsencode(path.suffix),
        b"a\nb\x1b[31m",
        "²".encode(),
    ]
    path.rename(path.parent / os.fsdecode(chance.choice(names)))
    return f"name of {path}"


def mutate(root: Path, chance: random.Random) -> tuple[Path, str]:
    """Damage one file below ``root``: which, and how."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    documents = [path for path in files if path.suffix == ".json" and path.name != "tokenizer.json"]
    tensors = [path for path in files if path.suffix == ".safetensors"]
    kinds: list[tuple[float, list[Path], Callable[[Path, random.Random], str]]] = [
        (4, documents, _change_json),
        (1, files, _change_bytes),
        (3, tensors, _change_header),
        (1, tensors, _change_data),
        (3, [path for path in files if path.suffix == ".toml"], _change_plan),
        (1.5, files, _change_kind),
        (0.5, files, _change_name),
    ]
    kinds = [kind for kind in kinds if kind[1]]
    ((_, candidates, change),) = chance.choices(kinds, [weight for weight, _, _ in kinds])
    path = chance.choice(candidates)
    try:
        return path, change(path, chance)
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
        return path, _change_bytes(path, chance)  # an earlier change has made it something else


# --------------------------------------------------------------------------------------------------------- commands

DELTAS = ("delta", "compressed", "weight_v000001")
"""Deltas of ``source``: the last is as slime writes one."""
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("plan", "source"),
    ("plan", "source", "--json"),
    ("plan", "source", "--tp", "2"),
    ("plan", "source", "--tp", "3", "--no-pad-vocab"),
    ("plan", "source", "--plan", "plan.toml", "--tp", "2"),
    ("plan", "source", "--plan", "plan.toml"),
    ("plan", "shards"),
    ("plan", "source", "--plan", "plan.toml", "--save", "OUT"),
    ("plan", "source", "--draft", "OUT"),
    ("plan", "shards", "--tp", "4", "--json"),
    ("inspect", "source"),
    ("inspect", "shards"),
    ("inspect", "shards", "--json"),
    ("inspect", "shards/rank-00-of-02"),
    ("inspect", "shards/rank-01-of-02/model-00001-of-00002.safetensors"),
    ("inspect", "bare"),
    ("split", "source", "OUT", "--tp", "2"),
    ("split", "source", "OUT", "--tp", "4", "--plan", "plan.toml"),
    ("split", "shards", "OUT", "--tp", "4"),
    ("split", "bare", "OUT", "--tp", "1", "--json"),
    ("split", "source", "OUT", "--tp", "2", "--quiet"),
    ("merge", "shards", "OUT"),
    ("merge", "bare", "OUT"),
    ("merge", "shards", "OUT", "--plan", "plan.toml", "--max-shard-size", "4kB"),
    ("verify", "source", "shards", "--exact-only"),
    ("verify", "source", "bare", "--exact-only"),
    ("verify", "source", "shards", "--exact-only", "--plan", "plan.toml", "--json"),
    ("split", "shards", "OUT", "--tp", "4", "--rank", "1", "--plan", "plan.toml"),
    ("inspect", "adapter"),
    ("merge", "adapter", "--into", "source", "OUT"),
    ("split", "source", "OUT", "--adapter", "adapter", "--tp", "2"),
    ("split", "adapter", "OUT", "--tp", "2", "--config", "source"),
    ("split", "adapter", "OUT", "--as", "peft-per-expert", "--config", "source"),
    ("diff", "source", "shards"),
    *(("patch", "source", delta, "OUT") for delta in DELTAS),
    *(("split", "source", "OUT", "--patch", delta, "--tp", "2") for delta in DELTAS),
)


@dataclass(frozen=True)
class Outcome:
    """What a command said."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class _TooLongError(BaseException):
    """A command that is still running when its time is over; its argument says which."""


LIMITS = ((signal.SIGPROF, signal.ITIMER_PROF, 3 * SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WAIT))
"""Signals that end a command, the clocks that send them, and when."""


def run(arguments: list[str]) -> Outcome:
    """Run the command line in this process, with streams as strict as those of a terminal."""

    def stop(number: int, _: object) -> None:
        raise _TooLongError(
            f"more than {3 * SECONDS:.0f} seconds" if number == signal.SIGPROF else f"waits for {WAIT:.0f} seconds"
        )

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=e) for e in ("strict", "backslashreplace")]
    kept = sys.stdout, sys.stderr
    before, began = [(number, signal.signal(number, stop)) for number, _, _ in LIMITS], _processor_time()
    for _, timer, seconds in LIMITS:
        signal.setitimer(timer, seconds)
    sys.stdout, sys.stderr = streams
    code = 0
    try:
        reshard(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        for (number, handler), (_, timer, _) in zip(before, LIMITS, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)
        sys.stdout, sys.stderr = kept
    said = []
    for stream in streams:
        stream.flush()
        said.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return Outcome(code, said[0], said[1], _processor_time() - began)


def _processor_time() -> float:
    """Seconds of this process and of those that it started and saw end."""
    found = os.times()
    return found.user + found.system + found.children_user + found.children_system


def complaints(arguments: list[str], outcome: Outcome, out: Path) -> list[str]:
    """What is wrong with a command's answer, whatever it was given."""
    found = []
    lines = outcome.stderr.splitlines()
    if outcome.code not in {0, 1, 2}:
        found.append(f"exit code {outcome.code}")
    if "internal error" in outcome.stderr or "Traceback" in outcome.stderr:
        found.append("it broke")
    if any(len(line) > LONGEST for line in lines):
        found.append(f"a line of {max(map(len, lines))} characters")
    if any(not (character.isprintable() or character == "\n") for character in outcome.stderr):
        found.append("control characters on stderr")
    errors = [line for line in lines if line.startswith("Error: ")]
    if outcome.code == 2 and len(errors) != 1 and arguments[0] != "verify":
        found.append(f"{len(errors)} lines of Error")
    if outcome.code and arguments[0] in {"split", "merge", "patch"} and (out.exists() or out.is_symlink()):
        found.append("output of a command that failed")
    if outcome.seconds > SECONDS:
        found.append(f"{outcome.seconds:.0f} seconds")
    return found


def most_memory() -> int:
    """The most bytes of memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def state(root: Path) -> dict[str, tuple[int, ...]]:
    """What lies below a folder, but for the output."""
    found = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith("OUT")]
        for name in (*folders, *files):
            status = os.lstat(Path(folder) / name)
            if not name.startswith("OUT"):
                found[os.path.join(folder, name)] = (status.st_mode, status.st_size, status.st_mtime_ns)  # noqa: PTH118
    return found


def other_bytes(out: Path, tuned: Path) -> list[str]:
    """The tensors of a patched checkpoint that are not as the delta should make them."""
    found, wanted = tensors(out), tensors(tuned)
    return [f"wrong bytes of {name!r}" for name in found if found[name] != wanted.get(name)]


def tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of a checkpoint's tensors."""
    found: dict[str, bytes] = {}
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        found |= {n: content[i.offset : i.offset + i.nbytes] for n, i in read_header(file).tensors.items()}
    return found


def make_base(root: Path) -> None:
    """What is damaged: a checkpoint of two files, the same split, split without a manifest, a plan file and deltas.

    Beside it, what the deltas make of the checkpoint.
    """
    write_checkpoint(root / "source", files=2)
    tuned = shutil.copytree(root / "source", root.parent / "tuned")
    for file in tuned.glob("*.safetensors"):
        for number, (name, info) in enumerate(read_header(file).tensors.items()):
            for at in range(0, info.nbytes, (2, 10, 60)[number % 3]):  # whole, and indices
                change_tensor(file, name, at=at)
    with chdir(root):
        for arguments in (
            ["split", "source", "shards", "--tp", "2", "--max-shard-size", "8kB"],
            ["split", "source", "bare", "--tp", "2"],
            ["plan", "source", "--save", "plan.toml"],
            ["diff", "source", str(tuned), "--out", "delta"],
            ["diff", "source", str(tuned), "--out", "compressed", "--compress"],
        ):
            outcome = run(arguments)
            assert outcome.code == (arguments[0] == "diff"), outcome
        shutil.copytree("compressed", "weight_v000001", ignore=shutil.ignore_patterns("delta.json"))
    (root / "bare/reshard.json").unlink()
    make_adapter(root / "adapter")


def make_adapter(folder: Path) -> None:
    """A LoRA of rank 2, with all settings that are read."""
    folder.mkdir()
    shapes = {name: shape for name, _, shape in llama_tensors() if name.endswith(("q_proj.weight", "down_proj.weight"))}
    tensors = []
    for name, (rows, columns) in shapes.items():
        place = f"base_model.model.{name.removesuffix('.weight')}"
        tensors += [(f"{place}.lora_A.weight", "F16", (2, columns)), (f"{place}.lora_B.weight", "F16", (rows, 2))]
    (folder / "adapter_model.safetensors").write_bytes(
        build_header(tensors, {"format": "pt"}) + b"\x00\x38" * (sum(tensor_bytes(*each) for each in tensors) // 2)
    )
    settings = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {"q_proj": 8},
        "bias": "none", "target_modules": ["q_proj", "down_proj"], "target_parameters": None, "exclude_modules": None,
        "layers_to_transform": None, "use_rslora": False, "peft_version": "0.21.2", "lora_B_layout": "rank_major",
        "init_lora_weights": True, "modules_to_save": None, "base_model_name_or_path": "source", "use_dora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def fuzz(base: Path, seed: int) -> list[str]:
    """Damage a copy of ``base`` by a seed, run some commands, and say what is wrong with their answers."""
    chance = random.Random(seed)
    found = []
    with tempfile.TemporaryDirectory(dir=base.parent) as scratch:
        root = Path(scratch) / "root"
        shutil.copytree(base, root, symlinks=True)
        with chdir(root):
            changes = [mutate(Path(), chance) for _ in range(chance.choice([1, 1, 1, 2, 3]))]
            touched, done = {path.parts[0] for path, _ in changes}, [what for _, what in changes]
            reading = [command for command in COMMANDS if touched & {word.partition("/")[0] for word in command}]
            name = os.fsdecode(b"caf\xff") if chance.random() < 0.03 else "source"
            Path("source").rename(name)
            for command in chance.sample(reading, min(4, len(reading))):
                arguments = [name if argument == "source" else argument for argument in command]
                before, peak = state(Path()), most_memory()
                try:
                    outcome = run(arguments)
                    wrong = complaints(arguments, outcome, Path("OUT"))
                    if arguments[0] == "patch" and outcome.code == 0 and touched <= {*DELTAS}:
                        wrong += other_bytes(Path("OUT"), base.parent / "tuned")
                except _TooLongError as error:
                    wrong = [str(error)]
                if state(Path()) != before:
                    wrong.append("something outside of the output was changed")
                after = most_memory()
                if after > max(MEMORY, peak):
                    wrong.append(f"{after >> 20} MiB of memory")
                found += [f"seed {seed}: {' '.join(arguments)}: {each} ({'; '.join(done)})" for each in wrong]
                for left in Path().glob("OUT*"):
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    return found


def run_seeds(made: Callable[[Path], object], fuzz_one: Callable[[Path, int], Iterable[str]]) -> int:
    """From the command line: fuzz what is made in a folder with one seed after another; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    began, failures, seed = time.monotonic(), 0, options.seed
    with tempfile.TemporaryDirectory() as folder:
        made(base := Path(folder) / "base")
        while (options.runs is None or seed < options.seed + options.runs) and (
            options.seconds is None or time.monotonic() < began + options.seconds
        ):
            try:
                found = [*fuzz_one(base, seed)]
            except Exception:
                traceback.print_exc()
                found = [f"seed {seed}: the fuzzer itself failed"]
            for line in found:
                print(line[:600].encode("ascii", "backslashreplace").decode(), flush=True)
            failures += len(found)
            seed += 1
    print(f"{seed - options.seed} seeds, {failures} failures, {time.monotonic() - began:.0f} s", flush=True)
    return int(failures > 0)


def main() -> int:
    """Fuzz from the command line."""
    resource.setrlimit(resource.RLIMIT_AS, (3 * MEMORY, resource.RLIM_INFINITY))
    return run_seeds(make_base, fuzz)


if __name__ == "__main__":
    sys.exit(main())
