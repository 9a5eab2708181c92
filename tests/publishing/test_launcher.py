"""Many processes that share one output: which process takes which ranks, and what the last one publishes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import PlanError
from reshard.system import Share, share_of_launcher
from tests.marks import thorough
from tests.support import LLAMA, command, contents, write_checkpoint

pytestmark = thorough


VARIABLES = [
    ({"RANK": "2", "WORLD_SIZE": "4", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Share(2, 4)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Share(1, 2)),
    ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Share(1, 3)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, Share(3, 4)),
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"}, Share(1, 2)),
    (
        {
            **{"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "5"},
            **{"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"},
        },
        Share(4, 8),
    ),
    (
        {
            **{"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "2"},
            **{"SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "3"},
        },
        Share(5, 6),
    ),
    ({"JOB_COMPLETION_INDEX": "0", "RESHARD_PROCESSES": "2"}, Share(0, 2)),
    ({"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}, Share(1, 2)),
]


@given(st.integers(1, 40), st.integers(0, 100))
def test_shares_are_all_of_it_and_never_overlap(count: int, number: int) -> None:
    shares = [Share(index, count).of(number) for index in range(count)]
    assert [piece for share in shares for piece in share] == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("environment", "share"), VARIABLES)
def test_variables_of_launchers(environment: dict[str, str], share: Share) -> None:
    assert share_of_launcher(environment) == share


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "none is set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "RESHARD_PROCESSES is not"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "which cannot be"),
        ({"RANK": "x", "WORLD_SIZE": "4"}, "which cannot be"),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_ARRAY_TASK_ID": "x", "SLURM_ARRAY_TASK_COUNT": "2"},
            "which cannot be",
        ),
    ],
)
def test_variables_that_make_no_sense(environment: dict[str, str], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        share_of_launcher(environment)


@pytest.mark.parametrize("count", [3, 5])
def test_processes_share_the_ranks_and_the_last_publishes(count: int, tmp_path: Path) -> None:
    source, out = write_checkpoint(tmp_path / "llama"), tmp_path / "out"
    line = [sys.executable, "-m", "reshard", "split", source, out, "--tp", "4", "--rank", "auto"]
    processes = [
        subprocess.Popen([*line], env={"RANK": str(index), "WORLD_SIZE": str(count)}, stdout=subprocess.PIPE, text=True)
        for index in range(count)
    ]
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    assert sum("The result is" in text for text in said) >= 1
    assert command("merge", out, tmp_path / "merged").returncode == 0
    assert contents(tmp_path / "merged") == contents(source)


def test_the_same_command_again_writes_what_a_lost_process_did_not(tmp_path: Path) -> None:
    source, out = write_checkpoint(tmp_path / "llama"), tmp_path / "out"

    def process(index: int) -> str:
        done = command("split", source, out, "--tp", "4", "--rank", "auto", RANK=str(index), WORLD_SIZE="2")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "still missing" in process(1)
    assert "missing      0, 1" in command("inspect", out).stdout.replace("missing     ", "missing      ")
    assert "none is left to write" in process(1)
    assert "The result is" in process(0) and "none is left to write" in process(0)


@pytest.mark.parametrize("launcher", ["Kubernetes", "SkyPilot"])
def test_the_job_files_of_the_documentation(launcher: str, tmp_path: Path) -> None:
    """Their command lines, with the variables that the launcher sets in each process."""
    text = (Path(__file__).parents[2] / "docs/how-to/cluster.md").read_text()
    job = yaml.safe_load(text.split(f"\n{launcher}:\n")[1].split("```yaml\n")[1].split("```")[0])
    if launcher == "Kubernetes":
        spec = job["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        count, line = spec["completions"], container["command"]
        own = {each["name"]: each["value"] for each in container["env"]}
        assert spec["parallelism"] == count == int(own["RESHARD_PROCESSES"])
        variables = [own | {"JOB_COMPLETION_INDEX": str(index)} for index in range(count)]
    else:
        count, line = job["num_nodes"], job["run"].split()
        own = {"SKYPILOT_NUM_NODES": str(count), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_TASK_ID": "1"}
        variables = [own | {"SKYPILOT_NODE_RANK": str(index)} for index in range(count)]
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 32}
    source = write_checkpoint(tmp_path / "llama", config=LLAMA | sizes)
    stands_for = {"org/model": str(source), "/shared/out": str(tmp_path / "out")}
    assert line[0] == "reshard" and stands_for.keys() <= set(line)
    for environment in variables:
        done = command(*(stands_for.get(word, word) for word in line[1:]), **environment)
        assert done.returncode == 0, done.stderr
    assert "The result is" in done.stdout
    assert command("verify", source, tmp_path / "out", "--exact-only").returncode == 0


def test_auto_goes_alone(tmp_path: Path) -> None:
    done = command(
        "split", write_checkpoint(tmp_path / "llama"), tmp_path / "o", "--tp", "2", "--rank", "auto", "--rank", "0"
    )
    assert done.returncode == 2 and "--rank auto goes without other ranks" in done.stderr


@pytest.mark.parametrize(
    ("sizes", "dealt"),
    [([8, 4, 4], [{0}, {1, 2}]), ([0, 0], [{0}, {1}]), ([1, 2, 3, 4], [{0, 3}, {1, 2}]), ([5], [{0}, set()])],
)
def test_pieces_of_work_are_dealt_by_their_sizes(sizes: list[int], dealt: list[set[int]]) -> None:
    """Not by their number: who has a large file gets fewer small ones; empty ones are dealt, too."""
    assert [Share(index, 2).of_sizes(sizes) for index in range(2)] == dealt
