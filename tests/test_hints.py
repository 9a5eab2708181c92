"""What the command line offers: completion in a shell, the nearest word to a wrong one, and which command was meant."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

import reshard
from reshard.cli.commands import COMMANDS, cli
from reshard.formats.files.safetensors import CASTS
from reshard.formats.hints import FLAGS, FUNCTIONS, OTHERS, SYNONYMS, VALUED, in_python
from reshard.formats.notation.format_file import adapter_format_names, format_names, names_to_write
from tests.support import command, command_named, write_checkpoint


class _Shell(ShellComplete):
    name = "none"
    source_template = ""


def completed(*words: str) -> list[tuple[str, str]]:
    shell = _Shell(cli, {}, "reshard", "_RESHARD_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions([*words[:-1]], words[-1])]


FREE = {"--revision", "--token", "--dtype", "--compute-dtype", "--device", "--prompt", "--weights"}
"""Options whose text nobody can complete."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shell_completes_whatever_a_command_takes(name: str) -> None:
    for param in command_named(name).params:
        is_text = param.type.name == "text" and not getattr(param, "is_flag", False)
        assert not is_text or FREE.intersection(param.opts), f"{name} {param.name}: a shell completes nothing"


@pytest.mark.parametrize(
    "words", [("split", "mod"), ("split", "model", "o"), ("merge", ""), ("verify", "a", "b"), ("inspect", "./x"),
              ("plan", "model", "--plan", "r"), ("formats", "m"), ("profile", "")]
)  # fmt: skip
def test_paths_are_completed_by_the_shell(words: tuple[str, ...]) -> None:
    assert completed(*words) == [("file", words[-1])]


def test_names_are_completed() -> None:
    for name in ("split", "plan", "formats"):
        assert [value for _, value in completed(name, "model", "--as", "")] == names_to_write()
    assert completed("split", "model", "out", "--as", "vl") == [("plain", "vllm"), ("plain", "vllm-0.23")]
    assert completed("models", "phi3s") == [("plain", "phi3small")]
    assert ("plain", "split") in completed("s")


@pytest.mark.parametrize(
    ("line", "error", "hint"),
    [
        ("splitt a b", "No such command 'splitt'", "did you mean 'split'? see 'reshard --help'"),
        ("xyz", "No such command 'xyz'", "see 'reshard --help'"),
        ("split a b -tp 2", "No such option '-tp'", "did you mean '--tp'? see 'reshard split --help'"),
        ("split a b -tp=2", "No such option '-tp'", "did you mean '--tp'? see 'reshard split --help'"),
        ("-tp 2 split a b", "No such option '-tp'", "--tp is an option of plan, profile, split, average;"),
        ("average a b c --weights x", "Invalid value for '--weights': 'x' is no list of numbers such as 0.5", "see"),
        ("split a b -xy 2", "No such option '-xy'", "see 'reshard split --help'"),
        ("split a b --to vllm", "No such option '--to'", "did you mean '--as'?"),
        ("plan a --format vllm", "No such option '--format'", "did you mean '--as'?"),
        ("split a b --torch-dtype float16", "No such option '--torch-dtype'", "did you mean '--dtype'?"),
        ("split a b --tensor_parallel_size 2", "No such option '--tensor_parallel_size'", "did you mean '--tp'?"),
        ("merge a b --as vllm", "No such option '--as'", "--as is an option of formats, plan, split, average;"),
        ("merge a b --to vllm", "No such option '--to'", "--as is an option of formats, plan, split, average;"),
        ("diff a b --output c", "No such option '--output'", "did you mean '--out'?"),
        ("split a --output c", "No such option '--output'", "the output is an argument: reshard split SOURCE OUT;"),
        ("convert a b", "No such command 'convert'", "did you mean 'split'?"),
        ("shard a b", "No such command 'shard'", "did you mean 'split'?"),
        ("push a b", "No such command 'push'", "reshard.live pushes weights between running programs"),
        ("quantize a b", "No such command 'quantize'", "'reshard split --quantize fp8-block' does, to fp8"),
        ("upload a b", "No such command 'upload'", "'hf upload ORG/NAME OUT' puts a folder on the Hub"),
        ("gguf a b", "No such command 'gguf'", "convert_hf_to_gguf.py of llama.cpp"),
        ("list", "No such command 'list'", "'reshard models' and 'reshard formats' list"),
        ("load a", "No such command 'load'", "reshard.load('model', tp=4, rank=0) gives a rank's tensors"),
        ("version", "No such command 'version'", "'reshard --version' says it"),
        ("split a b --as mlx", "unknown format 'mlx'", "'mlx_lm.convert' makes MLX"),
        ("split a b", "Missing option '--tp' (or '--ep', '--pp'); --as FORMAT", "see 'reshard split --help'"),
        ("split a b --as vllm", "Missing option '--tp' (or '--ep', '--pp'), which vllm needs", "see 'reshard split"),
        ("split a b --tp", "Option '--tp' requires an argument", "see 'reshard split --help'"),
        ("split model b --tp 0", "--tp 0 is not possible", "see 'reshard split --help'"),
        ("live plan model --from fsdp:8 --to vllm:tp4", "'fsdp:8': no program is called 'fsdp'", "did you mean fsdp2?"),
        ("live plan model --from fsdp2:8 --to vllm:4", "'vllm:4': vllm is not a trainer", "did you mean vllm:tp4?"),
        ("split S3://a/b c --tp 2", "no such folder: S3://a/b", "write s3:// in small letters"),
        ("split a b --as gguf", "unknown format 'gguf'", "convert_hf_to_gguf.py of llama.cpp"),
        ("split a b --as vLLM", "unknown format 'vLLM'", "did you mean 'vllm'? known formats: "),
        ("split a b --as hf", "unknown format 'hf'", "did you mean 'huggingface'? known formats: "),
        ("split model hf://me/repo --tp 2", "hf://me/repo: no such kind of store", "'hf upload ORG/NAME OUT' puts"),
        ("split model me/repo --tp 2", "me: no such folder", "make it first; 'hf upload ORG/NAME OUT' puts"),
        ("formats vllm", "'vllm' is a format, not a SOURCE: give 'reshard formats --as vllm'", "see 'reshard formats"),
        ("formats --as vlm", "unknown format 'vlm'", "did you mean 'vllm'? known formats: "),
        ("plan model --as huggingface", "'huggingface' is one full checkpoint: there are no ranks to plan for", "give"),
        ("models llamma", "no model type has 'llamma' in its name", "did you mean 'llama'"),
    ],
)  # fmt: skip
def test_the_nearest_word_is_offered(line: str, error: str, hint: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    done = command(*line.split(), cwd=tmp_path)
    first, second = done.stderr.splitlines()
    assert done.returncode == 2 and first.startswith(f"Error: {error}") and "Did you mean" not in first
    assert second.startswith(f"Hint: {hint}")


def test_help_and_version_in_other_words() -> None:
    assert command("help").stdout == command("--help").stdout
    assert command("help", "split").stdout == command("split", "--help").stdout
    assert command("-V").stdout == command("--version").stdout


def test_all_formats_are_known_but_what_no_program_loads(tmp_path: Path) -> None:
    known = command("formats", "--as", "x", cwd=tmp_path).stderr.partition("known formats: ")[2].strip().split(", ")
    every = {*format_names(), *adapter_format_names(), "huggingface"}
    assert known == names_to_write() and every - {*known} == {"torchtitan-live"}


@pytest.mark.parametrize("word", SYNONYMS)
def test_what_a_synonym_means_is_there(word: str) -> None:
    """Each entry of the table names a command, an option or a format that exists."""
    options = {option for name in COMMANDS for param in command_named(name).params for option in param.opts}
    assert SYNONYMS[word] in {*COMMANDS, *options, *names_to_write(), *CASTS}
    assert word not in {*COMMANDS, *names_to_write()}


def test_a_folder_that_is_called_as_a_format_is_a_source(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "vllm")
    assert "possible" in command("formats", "vllm", cwd=tmp_path).stdout


def test_formats_are_listed_with_what_loads_them(tmp_path: Path) -> None:
    listed = command("formats").stdout
    assert "huggingface " in listed and 'AutoModelForCausalLM.from_pretrained("OUT")' in listed
    assert "vllm serve OUT --load-format sharded_state --tensor-parallel-size RANKS" in listed
    assert all(f"\n{name} " in listed for name in names_to_write() if name != "huggingface")
    assert "-live" not in listed
    one = command("formats", "--as", "huggingface").stdout
    assert one.startswith("huggingface\n") and "model.safetensors" in one
    write_checkpoint(tmp_path / "model")
    assert command("split", "model", "out", "--tp", "2", cwd=tmp_path).returncode == 0
    for source, possible in (("model", "no "), ("out", "yes")):
        found = command("formats", source, "--as", "huggingface", cwd=tmp_path).stdout.splitlines()[1]
        assert found.split()[1] == possible.strip()


def test_models_says_where_a_part_was_found() -> None:
    assert "with 'lama' in their name or in that of their rules. " in command("models", "lama").stdout


def test_exchanged_arguments_of_verify_are_compared_and_said_to_be(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    for form in ((), ("--as", "vllm")):
        assert command("split", "model", "out", "--tp", "2", *form, "--overwrite", cwd=tmp_path).returncode == 0
        done = command("verify", "out", "model", "--exact-only", cwd=tmp_path)
        assert done.returncode == 0 and "the original, put together by reshard's merge; no forward pass" in done.stdout


# ------------------------------------------------------------------------------------------------------------ in Python


ROOT = Path(__file__).parents[1]


def texts() -> Iterator[str]:
    """All texts of the library in which an option or a command stands, with X for what is filled in."""
    for file in (file for folder in ("formats", "reshard", "verify") for file in (ROOT / folder).rglob("*.py")):
        if "cli" in {*file.parts, file.stem} or file.name == "draft.py":
            continue
        tree = ast.parse(file.read_text())
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in (node for node in ast.walk(tree) if id(node) not in docstrings):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node] if id(node) not in inside else []
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)
            if isinstance(node, ast.JoinedStr | ast.Constant) and re.search(r"--[a-z]|'reshard [a-z]+", text):
                yield text
    for toml in [*(ROOT / "formats").rglob("*.toml")]:
        yield from re.findall(r'^(?:hint|"[^"]+") = "(.*--[a-z].*)"$', toml.read_text(), re.MULTILINE)


def test_hints_speak_python_to_a_python_caller() -> None:
    """Every option that a function takes is an argument, with a value that is one; every call binds."""
    calls = 0
    for text in texts():
        spoken = in_python(text)
        left = set(re.findall(r"--([a-z][a-z-]*)", re.sub(r"'reshard [^']*'", "", spoken)))
        assert not left & {*FLAGS, *VALUED, *OTHERS}, spoken
        for name, value in re.findall(r"\b([a-z_]+)=(\"[^\"]*\"|[^\s,;)]+)", spoken):
            known = value in ("True", "False", "...") or re.fullmatch(r"[A-Z]+|\d+", value)
            assert known or value.strip('"') in VALUES, (name, value, spoken)
        for name, arguments in re.findall(r"reshard\.([a-z]+)\(([^)]*)\)", spoken):
            call = ast.parse(f"f({arguments})", mode="eval").body
            assert isinstance(call, ast.Call)
            named = {str(each.arg): None for each in call.keywords}
            inspect.signature(getattr(reshard, name)).bind_partial(*call.args, **named)
            calls += 1
    assert calls > 5


VALUES = {"float32", "fp32", "published", "cpu", "huggingface", "peft", "vllm", "prefill", "fp8-block", "main"}


def test_the_words_of_python_are_those_of_the_options() -> None:
    """Each option that is an argument of a function with the same name is in the table, and as what it is."""
    for name in FUNCTIONS:
        fields = inspect.signature(getattr(reshard, name)).parameters
        for param in command_named(name).params:
            option = max(param.opts, key=len).removeprefix("--")
            if not isinstance(param, click.Option) or param.name not in fields or option == "progress":
                continue
            kinds = OTHERS if option in OTHERS else FLAGS if param.is_flag else VALUED
            assert option in kinds, option
            assert in_python(f"give --{option}").startswith(f"give {param.name}"), option


@pytest.mark.parametrize(
    ("typed", "spoken"),
    [
        ("pass --overwrite to write it again", "pass overwrite=True to write it again"),
        ("give a token with --token (or HF_TOKEN)", "give a token with token (or HF_TOKEN)"),
        ("pass it with --plan /a b.toml", 'pass it with plan_file="/a" b.toml'),
        ("'reshard split A B --adapter C' makes it", "reshard.split(A, B, adapter=C) makes it"),
        ("'reshard merge /x OUT --no-checksum'", 'reshard.merge("/x", OUT, checksum=False)'),
        ("'reshard split … --tp 2 --rank R'", "reshard.split(..., tp=2, ranks=R)"),
        ("'reshard patch BASE DELTA OUT', 'reshard split'", "'reshard patch BASE DELTA OUT', reshard.split"),
        ("'reshard plan X --save FILE', --plan FILE", "'reshard plan X --save FILE', plan_file=FILE"),
        ("torchrun --nproc-per-node 2, a--tp b", "torchrun --nproc-per-node 2, a--tp b"),
        ("--no-pad-vocab, --as=vllm; --tp 4.", 'pad_vocab=False, format="vllm"; tp=4.'),
    ],
)
def test_a_text_in_pythons_words(typed: str, spoken: str) -> None:
    assert in_python(typed) == spoken and in_python(spoken) == spoken
