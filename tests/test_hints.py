"""What the command line offers: completion in a shell, the nearest word to a wrong one, and which command was meant."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from reshard.cli.commands import COMMANDS, cli
from reshard.formats.files.safetensors import CASTS
from reshard.formats.hints import SYNONYMS
from reshard.formats.notation.format_file import adapter_format_names, format_names, names_to_write
from tests.support import command, write_checkpoint


class _Shell(ShellComplete):
    name = "none"
    source_template = ""


def completed(*words: str) -> list[tuple[str, str]]:
    shell = _Shell(cli, {}, "reshard", "_RESHARD_COMPLETE")
    return [(item.type, item.value) for item in shell.get_completions([*words[:-1]], words[-1])]


FREE = {"--revision", "--token", "--dtype", "--compute-dtype", "--device", "--prompt"}
"""Options whose text nobody can complete."""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shell_completes_whatever_a_command_takes(name: str) -> None:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    for param in found.params:
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
        ("plan model --from fsdp:8 --to vllm:tp4", "'fsdp:8': no program is called 'fsdp'", "did you mean fsdp2?"),
        ("plan model --from fsdp2:8 --to vllm:4", "'vllm:4': vllm is no trainer", "did you mean vllm:tp4?"),
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
    commands = [command for name in COMMANDS if (command := cli.get_command(click.Context(cli), name)) is not None]
    options = {option for each in commands for param in each.params for option in param.opts}
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


def test_exchanged_arguments_of_verify_are_one_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    for form in ((), ("--as", "vllm")):
        assert command("split", "model", "out", "--tp", "2", *form, "--overwrite", cwd=tmp_path).returncode == 0
        done = command("verify", "out", "model", "--exact-only", cwd=tmp_path)
        assert done.returncode == 2 and "built-in rules" not in done.stdout
        assert "Hint: give the full checkpoint first, then the shards" in done.stderr
