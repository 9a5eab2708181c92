"""Real launchers: each starts processes that share a split by ranks and a merge by files.

    python -m tests.engines.launchers [--processes 4]

torchrun, Open MPI's mpirun and a Slurm of one node, which is started here (Debian: munge, slurm-wlm, openmpi-bin; as
root). Prints a line for each: whether the merge is the original, and seconds; or why it was not run. Exit code 1: one
was wrong.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.checkpoints import write_llama

RANKS = 8

SLURM = """\
ClusterName=reshard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={processes} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=4)
    count = parser.parse_args().processes
    torchrun = ["torchrun", "--nproc-per-node", str(count), "--no-python"]
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(count)]
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="reshard-launchers-") as scratch:
        folder = Path(scratch)
        source = write_llama(folder / "llama", 0.05)
        for name, line in (("torchrun", torchrun), ("mpirun", mpirun)):
            if shutil.which(line[0], path=_path()) is None:
                print(f"{name}: not run, it is not installed")
            else:
                wrong += not check(name, line, source, folder / name)
        missing = [
            tool for tool in ("munged", "slurmctld", "slurmd", "srun") if shutil.which(tool, path=_path()) is None
        ]
        if missing or os.getuid() != 0:
            print(
                f"Slurm: not run, {missing[0]} is not installed" if missing else "Slurm: not run, it is started as root"
            )
        else:
            with slurm(folder / "slurm", count):
                wrong += not check("Slurm", ["srun", "-n", str(count)], source, folder / "of-slurm")
    return min(wrong, 1)


def check(name: str, launcher: Sequence[str], source: Path, folder: Path) -> bool:
    """Split, merge and compare, each by as many processes as the launcher starts."""
    folder.mkdir()
    out, merged, started = folder / "out", folder / "merged", time.monotonic()
    reshard = str(Path(sys.executable).with_name("reshard"))
    for line in (
        [reshard, "split", str(source), str(out), "--tp", str(RANKS), "--rank", "auto"],
        [reshard, "merge", str(out), str(merged), "--part", "auto", "--max-shard-size", "5MB"],
        [reshard, "merge", str(out), f"{merged}-whole", "--part", "auto"],
    ):
        done = subprocess.run([*launcher, *line], capture_output=True, text=True, timeout=300, env=_environment())
        if done.returncode:
            print(f"{name}: exit code {done.returncode}: {done.stderr[-2000:]}")
            return False
    same = filecmp.dircmp(source, f"{merged}-whole")
    _, differ, odd = filecmp.cmpfiles(source, f"{merged}-whole", same.common_files, shallow=False)
    is_same = not (same.left_only or same.right_only or differ or odd) and merged.is_dir()
    seconds = time.monotonic() - started
    print(f"{name}: {'the original again' if is_same else 'NOT the original'}, in {seconds:.1f} s", flush=True)
    return is_same


@contextmanager
def slurm(folder: Path, count: int) -> Iterator[None]:
    """A Slurm of this machine alone; ``SLURM_CONF`` says where it is."""
    (folder / "spool").mkdir(parents=True)
    (folder / "state").mkdir()
    host, ports = platform.node().partition(".")[0], (_free_port(), _free_port())
    config = folder / "slurm.conf"
    config.write_text(SLURM.format(host=host, ports=ports, folder=folder, processes=count))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    os.environ["SLURM_CONF"] = str(config)
    munge = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    with ExitStack() as stack:
        for line in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
            ["slurmctld", "-D"],
            ["slurmd", "-D", "-N", host],
        ):
            process = subprocess.Popen(line, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            time.sleep(1)
        give_up = time.monotonic() + 60
        while "idle" not in _said("sinfo", "-h", "-o", "%T"):
            if time.monotonic() > give_up:
                raise SystemExit(f"Slurm: the node is not ready: {_said('sinfo', '-R')}")
            time.sleep(0.5)
        yield


def _said(*line: str) -> str:
    return subprocess.run(line, env=_environment(), capture_output=True, text=True, check=False).stdout


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _path() -> str:
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"


def _environment() -> dict[str, str]:
    return os.environ | {"PATH": _path()}


if __name__ == "__main__":
    sys.exit(main())
