"""Whether the tests notice: one line of the code is changed at a time, and the tests that should fail are run.

    python -m benchmarks.mutations [--only 3,17] [--list] [--quick]

Each mutation is a text of the code and what is put in its place, in a copy of the repository. The text is looked for in
all files of a folder, so that it may move, and must be there exactly once: a mutation whose text has changed ends the
run with an error before any test runs. Prints for each whether it was caught, by which test, and in how many seconds.
The exit code is 1 if one survived.
``--quick`` runs what ``make test`` runs, and shows what it leaves to ``make test-all``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("formats", "reshard", "verify", "tests", "tools", "benchmarks", "docs", "README.md", "pyproject.toml")


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in the one file below ``folder`` that has it; ``tests`` should then fail."""

    folder: str
    old: str
    new: str
    tests: tuple[str, ...]


AXES = ("tests/formats/test_axes.py", "tests/move/test_slabs.py", "tests/commands/test_split.py")
MOVES = ("tests/move/test_slabs.py", "tests/commands/test_split.py", "tests/publishing/test_lost_or_mixed.py")
SUMS = ("tests/move/test_checksum.py", "tests/commands/test_split.py")
COLLECTIVES = ("tests/verify/test_collectives.py", "tests/verify/test_layers.py", "tests/verify/test_uneven_forward.py")
LAYERS = ("tests/verify/test_layers.py", "tests/verify/test_forward.py")
FORWARD = ("tests/verify/test_limits.py", "tests/verify/test_forward.py")
BOTH_SIDES = ("tests/verify/test_encoder_decoder.py",)
NOISE = ("tests/verify/test_noise.py", *FORWARD)
EXACT = ("tests/verify/test_exact.py", "tests/verify/test_folder.py")
CHUNKS = ("tests/verify/test_chunks.py",)
QUANTIZED = (
    "tests/formats/test_quantization.py",
    "tests/source/test_quantized.py",
    "tests/commands/test_hostile_input.py",
)
EXPERTS = ("tests/verify/test_layers.py", "tests/verify/test_experts.py")
ZOO = ("tests/test_zoo_sanity.py",)
PLACES = ("tests/placement/test_pieces.py",)
KILLS = ("tests/publishing/test_output.py",)
PARTS = ("tests/publishing/test_parts.py",)
BUCKETS = ("tests/stores/test_remote_ranges.py",)
ORDERS = ("tests/publishing/test_bucket_interleavings.py",)
LAUNCHES = ("tests/verify/test_launch.py",)
RESUMING = ("tests/publishing/test_resuming.py",)
TIED = ("tests/source/test_tied_twice.py",)
CASTS = ("tests/transforms/test_cast.py",)
GRADIENTS = ("tests/verify/test_forward.py::test_gradients_are_those_of_the_original",)
UNEVEN = ("tests/mesh/test_uneven.py",)
COMMANDS = ("tests/verify/test_cli.py",)
VLLM = ("tests/programs/test_vllm.py", "tests/programs/test_engine_names.py")
PROFILE = ("tests/profile/test_profile.py",)
WITNESS = ("tests/live/test_witness.py",)
LOADER = ("tests/verify/test_loader.py",)
RECEIVER = ("tests/live/test_vllm_engine.py",)
ROUTES = ("tests/live/test_combinations.py",)
CHANGES = ("tests/live/test_changes.py",)

MUTATIONS = (
    # the notation
    Mutation("formats", "for axis in reversed(list(parts)):", "for axis in list(parts):", AXES),
    Mutation("formats", "math.gcd(sizes[axis], remaining)", "math.gcd(sizes[axis], degree)", AXES),
    Mutation("formats", "runs += (Run(start + run.offset, run.length)", "runs += (Run(run.offset, run.length)", AXES),
    Mutation("formats", "if last is not None and last.end == run.offset:", "if last is not None:", AXES),
    # moving bytes
    Mutation("reshard", "min(max(index - run.offset, 0), run.length)", "max(index - run.offset, 0)", MOVES),
    Mutation("reshard", "holders[: None if self._compare else 1]", "holders[:1]", MOVES),
    Mutation("reshard", "place = place * size + local_index(runs, index)", "place = place * size + index", MOVES),
    Mutation("reshard", "yield from (slab.shifted(by) for by", "yield from (slab for by", MOVES),
    Mutation("reshard", "offset=end - rest, length=rest)])", "length=rest)])", MOVES),
    Mutation("reshard", "origin.part if is_all else None", "origin.part", MOVES),
    Mutation("reshard", "first + before == base + offset and position + before == begin + at",
             "position + before == begin + at", MOVES),
    Mutation("formats", "first = offset // WORD % WIDTH", "first = 0", SUMS),
    Mutation("formats", "self._columns[: last - WIDTH] += part.columns[WIDTH - first :]", "pass", SUMS),
    Mutation("formats", "if last <= WIDTH:", "if True:", SUMS),
    # places: where an element lies
    Mutation("formats", "inner, end = math.prod(sizes[1:]), begin + length",
             "inner, end = sizes[-1], begin + length", PLACES),
    Mutation("formats", "count = min(inner - start, end - begin)", "count = inner - start", PLACES),
    Mutation("reshard/placement", "key=lambda pair: pair[0]))", "key=lambda pair: 0))", PLACES),
    Mutation("reshard", "*row_major(sizes[slot][:outer], sum(inner)),",
             "*row_major(sizes[slot][:outer], inner[slot]),", PLACES),
    Mutation("reshard", "strides), sum(inner[:slot]))", "strides), 0)", PLACES),
    Mutation("reshard", "return self._places[holder][number // len(self.portions)] * stride",
             "return number // len(self.portions) * stride", PLACES),
    Mutation("reshard", "local = (local_index(runs, segment.offset)", "local = (segment.offset", PLACES),
    Mutation("reshard", "piece.base + sum(map(mul, local, piece.strides))", "piece.base + sum(local)", PLACES),
    Mutation("reshard", "        if last.is_data and last.targets:\n", "        if last.targets:\n", PLACES),
    Mutation("reshard", "key = dim, within.sources, within.targets, within.is_data",
             "key = dim, within.sources, within.is_data", PLACES),
    Mutation("reshard", "if segment.targets or not segment.is_data:", "if segment.targets:", MOVES),
    Mutation("reshard", "low, high = max(inner.offset, first), min(inner.end, end)", "low, high = first, end",
             PLACES),
    Mutation("reshard", "*row_major(factors[:lead], row * step)", "*row_major(factors[:lead], (end - first) * step)",
             PLACES),
    Mutation("reshard", "in product_boxes(low - first, high - low,", "in product_boxes(low, high - low,", PLACES),
    Mutation("reshard", "places.append((at + (first - before) * step, runs))", "places.append((at, runs))",
             PLACES),
    Mutation("reshard", "sum(extents[:number]), sum(extents)", "sum(extents[:number]), extents[-1]", PLACES),
    Mutation("reshard", "elif outer and stride == outer[-1][0] * outer[-1][1]:", "elif outer:", PLACES),
    Mutation("reshard", "for size, stride in ((shape[d], piece.strides[d]) for d in reversed(order)):",
             "for size, stride in ((shape[d], piece.strides[d]) for d in reversed(range(len(order)))):", PLACES),
    Mutation("reshard", "rows += [rows_of(piece, target.order,", "rows += [rows_of(piece, source.order,", PLACES),
    Mutation("reshard", "if groups and is_whole and place[d] == place[groups[-1][-1]] + 1:",
             "if groups and is_whole:", PLACES),
    Mutation("reshard", "within.is_data and run.offset < size,", "within.is_data and run.offset <= size,", PLACES),
    Mutation("reshard", "return block.transpose([*axes, *range(len(axes), block.ndim)])",
             "return block", PLACES),
    # quantization
    Mutation("formats", "else 'groups' if desc_act else", "else", QUANTIZED),
    Mutation("formats", "inverse = \"'stored lead out/{rows} in/{columns} |",
             "inverse = \"'stored lead out/{columns} in/{rows} |", QUANTIZED),
    Mutation("formats", "'tensor' if group_size is None else 'group' if group_size > 0 else 'channel'",
             "'tensor' if group_size is None else 'group'", QUANTIZED),
    # the bytes
    Mutation("verify", "np.broadcast_to(right.dtype.type(constant), right.shape)", "right", EXACT),
    Mutation("verify/bytes", "return count + size * own_row", "return count", CHUNKS),
    Mutation("verify/bytes", "b.padded.first < chunk.end and", "b.padded.first <= chunk.offset and", CHUNKS),
    Mutation("verify", "elif info.dtype != stored.dtype or info.shape != shape:",
             "elif info.shape != shape:", EXACT),
    Mutation("verify", "for name in dict.fromkeys((*expected, *found)):", "for name in expected:", EXACT),
    # collectives and layers
    Mutation("verify", "lambda grad: reduce_from_group(grad, group)", "lambda grad: grad", COLLECTIVES),
    Mutation("verify", "return torch.promote_types(dtype, torch.float32)", "return dtype", COLLECTIVES),
    Mutation("verify", "narrow(dim, sum(lengths[:rank]), lengths[rank])", "narrow(dim, 0, lengths[rank])", COLLECTIVES),
    Mutation("verify", "vectors.masked_fill(~is_local.unsqueeze(-1), 0)", "vectors", LAYERS),
    Mutation("verify", "padding_row - first_row if own_padding", "padding_row if own_padding", LAYERS),
    Mutation("verify", "return whole[..., : len(order)] if is_in_order", "return whole if is_in_order", LAYERS),
    Mutation("verify", "torch.arange(self.start, self.start + len(part)", "torch.arange(0, len(part)", EXPERTS),
    # a rank's model: what only a few architectures need
    Mutation("verify", "if not groups.is_first(roles[name].along)]", "if groups.is_first(roles[name].along)]", EXPERTS),
    Mutation("verify", '{"column", "vector"} and not layout', '{"column"} and not layout', BOTH_SIDES),
    Mutation("verify", "if rule.sums in named and named", "if False and named", FORWARD),
    Mutation("verify", "return self._part(out, dims, indices)", "return out", FORWARD),
    Mutation("verify", "        if rule.alone:\n", "        if False:\n", FORWARD),
    # KV heads that several ranks have, and parts that are not equal
    Mutation("verify", 'full[torch.meshgrid(*indices, indexing="ij")] += grad.to(wide)',
             'full[torch.meshgrid(*indices, indexing="ij")] = grad.to(wide)', GRADIENTS),
    Mutation("formats", "-(-size // (self.unit * self.parts)) * self.unit",
             "size // (self.unit * self.parts) * self.unit", UNEVEN),
    # the comparison
    Mutation("verify/forward", "return self.ratio <= LIMIT", "return not self.ratio > LIMIT", NOISE),
    Mutation("verify", "floor = FLOOR * torch.finfo(dtype).eps", "floor = 0.0", NOISE),
    Mutation("verify", "if LIMIT < worst <= SURE:", "if False:", NOISE),
    Mutation("verify", "if not (may_be_rounding and LIMIT < worst < math.inf):", "if True:", NOISE),
    Mutation("verify", "key=lambda pair: pair[1].ratio) for", "key=lambda pair: -pair[0]) for", NOISE),
    Mutation("verify", "if name in trace.outputs else state.isinf()", "if name in trace.outputs else state.isnan()",
             NOISE),
    # what is asked of every model of the zoo
    Mutation("reshard", "return {axis: run.length for axis, run in self.rank_runs(rank, sizes).items()}",
             "return {**sizes}", ZOO),
    Mutation("reshard", "both if kind.template in tied else frozenset({at})", "frozenset({at})", ZOO),
    # processes: killed, of an engine, of another launcher, on a terminal
    Mutation("reshard", "self.finished |= self._finished_files(self.share.files)", "pass", KILLS),
    Mutation("reshard", "self._is_last = is_alone and not left and planned", "self._is_last = planned", PARTS),
    Mutation("reshard", "is_like and self.files.isdisjoint(run.begin[\"files\"])", "is_like", PARTS),
    Mutation("reshard", "if self._may_hold_others and self._is_built():", "if False:", PARTS),
    Mutation("reshard", "shutil.disk_usage(self.work).free // 2)", "1 << 60) + (1 << 60)", BUCKETS),
    Mutation("verify", "= group.gather(fn(*args))", "= [fn(*args)] * world_size", LAUNCHES),
    Mutation("verify", "            show()\n\n    thread", "            pass\n\n    thread", COMMANDS),
    # parts, uploads, requests that are made again
    Mutation("reshard", "loads[least] += sizes[number] + 1", "loads[least] += 1",
             ("tests/publishing/test_launcher.py",)),
    Mutation("reshard", "== uploaded.etag}", "is not None}", BUCKETS),
    Mutation("reshard", "if there is None or (etag is not None", "if there is not None and (etag is not None", ORDERS),
    Mutation("reshard", "if content is not None and isinstance(error, PublishedError):",
             "if isinstance(error, PublishedError):", ORDERS),
    Mutation("reshard", "{key for key in objects if key.startswith(JOURNAL)} - mine", "set()", ORDERS),
    Mutation("reshard", "self._new_key(_NOBODY)", "self._journal_key", ORDERS),
    Mutation("reshard", "if owner not in {None, self._name} or (", "if (", ORDERS),
    Mutation("reshard", "if foreign or not self.share", "if not self.share", ORDERS),
    Mutation("reshard", "if not (was_empty and has_last) or", "if True or", ORDERS),
    Mutation("reshard", 'in {"408", "429"} or status.startswith("5")', 'in {"408", "429"}', BUCKETS),
    # what vLLM was compared with
    Mutation("reshard", "if largest is not None and degree > largest:", "if False:", VLLM),
    Mutation("reshard", "if dimension not in compared:", "if False:", VLLM),
    Mutation("tools", "(BITS * place) & (2**BITS - 1)", "BITS & (2**BITS - 1)", VLLM),
    # what a plan keeps for its arrangements, and the memory that a degree needs
    Mutation("reshard", "DTYPE_BITS[kind.dtype] % 8, parts, kind.stages,", "DTYPE_BITS[kind.dtype] % 8, kind.stages,",
             ("tests/programs/test_oracles.py", "tests/programs/test_megatron.py")),
    # recognising, and reading what lies elsewhere
    Mutation("reshard", "max([count, *counts, mesh.size if mesh else 0])", "max([count, *counts])",
             ("tests/commands/test_inspect_programs.py",)),
    Mutation("reshard", "whole[begin - first : end - first] if end - first <= len(whole) else None",
             "whole[begin - first : end - first]", ("tests/stores/test_remote_ranges.py", "tests/stores/test_hub.py")),
    Mutation("formats", 'condition + (f" and ({rule.when.text})" if rule.when else "")',
             "rule.when.text if rule.when else condition",
             ("tests/formats/test_format_file.py",)),
    Mutation("reshard/profile", "return self.memory.total <= self.capacity", "return True", PROFILE),
    # resuming, tied tables, casts
    Mutation("reshard/move", "any(moved.written.get(target.name) != part.digest() for target, part in sums.items())",
             "False", RESUMING),
    Mutation("reshard/model", "for b, a in pairs if (b.dtype, b.shape, b.local) ==",
             "for b, a in pairs if b and", TIED),
    Mutation("verify/bytes", "steps = np.rint(np.ldexp(", "steps = np.floor(np.ldexp(", CASTS),
    # adapters, and ranges of what is computed
    Mutation("reshard/transforms", "ends[block.expert] if side_by_side else 0", "0",
             ("tests/transforms/test_converted_adapters.py::test_different_as_lie_side_by_side",)),
    Mutation("reshard/transforms", "matrix, along, run, at + first)", "matrix, along, run, first)",
             ("tests/transforms/test_merged_adapters.py::test_it_is_merged_as_peft_merges_it",)),
    Mutation("reshard/transforms", "data[begin - first * unit :]", "data[0:]",
             ("tests/transforms/test_merged_adapters.py::test_no_bit_depends_on_the_range_that_is_read",)),
    # ranks as threads
    Mutation("verify/rank", "return total.to(x.device, copy=True)", "return total.to(x.device)", LAUNCHES),
    Mutation("verify/rank", "for rank in range(1, self.size):", "for rank in range(1, 2):", COLLECTIVES),
    Mutation("verify/rank", "        if purpose == what:\n", "        if True:\n", LAUNCHES),
    Mutation("verify/rank", " for rank, wait in sorted(self._waiting.items()) if not wait.until()}",
             " for rank, wait in sorted(self._waiting.items())}", LAUNCHES),
    Mutation("verify/rank", "            self._go[rank].acquire()\n            self.check()\n",
             "            self._go[rank].acquire()\n", LAUNCHES),
    Mutation("verify/rank", "self._turns.is_alone = self.rank == 0", "pass", LAUNCHES),
    Mutation("verify/rank", "PyThreadState_SetAsyncExc(ident, over)", "PyThreadState_Check(None)", LAUNCHES),
    Mutation("verify/rank", "= self._failure or (rank, error)", "= (rank, error)", LAUNCHES),
    Mutation("reshard/profile", "with _without_the_script(), undone(kill):", "with undone(kill):", LAUNCHES),
    # a program's own loader
    Mutation("verify/loader", "if argument.alias_info is not None and argument.alias_info.is_write:", "if False:",
             LOADER),
    Mutation("verify/loader", "marks == _OTHER, marks == _UNTOUCHED", "marks == _OTHER, marks != marks", LOADER),
    Mutation("verify/loader", "if func in _OUTSIDE and memory(args[0]) in self._names:", "if False:", LOADER),
    Mutation("verify/loader", "return is_written is False", "return False", LOADER),
    # live: the plan of a push
    Mutation("reshard/live", "int(place) * stride for", "int(place) for", ROUTES),
    Mutation("reshard/live", "first(at.holder, number) + at.base", "first(at.holder, number)", ROUTES),
    Mutation("reshard", "at._replace(base=at.base + begin * at.strides[dim])", "at", ROUTES),
    Mutation("reshard/live", "(total[at.holder % first] + cost[at.holder % first], at.holder", "(0, at.holder", ROUTES),
    Mutation("reshard/live", "if hosts[at.holder % first] == hosts[receiver]", "if True", ROUTES),
    Mutation("reshard/live", "if moves and int((load + cost).max()) > bucket:", "if False:", ROUTES),
    Mutation("reshard/live", "if max(most.values(), default=0) * item > bucket:", "if False:", ROUTES),
    Mutation("reshard/live", "-DTYPE_BITS[part.move.dtype]", "0", ROUTES),
    Mutation("reshard/live", "if move.dtype == stored and function is None:", "if move.dtype == stored:", ROUTES),
    # live: a push of what changed
    Mutation("reshard/live", "self._sent.copy_(new)", "pass", CHANGES),
    Mutation("reshard/live", ".equal(room[:_SUM].view(torch.int64)[0])", ".isfinite()", CHANGES),
    Mutation("reshard/live", " for part in parts)] if is_plain else None", " for part in parts)]", CHANGES),
    Mutation("reshard/live", "        self._base = None  # until", "        # until", CHANGES),
    Mutation("reshard/live", "        if not has_base:\n", "        if True:\n", CHANGES),
    Mutation("reshard/live", "bases != {None} and len(bases) == 1", "bases != {None}", CHANGES),
    # live: the second witness, and vLLM's worker
    Mutation("reshard/live", "Copied(into, numbers[origin.name], origin)", "Copied(into, 0, origin)", WITNESS),
    Mutation("reshard/live", " & (rows[:-1, 2] == rows[1:, 2])", "", WITNESS),
    Mutation("reshard/live", "strides[outer - 1] == (length, length)", "strides[outer - 1][0] == length", WITNESS),
    Mutation("reshard/live", "rows_at[0] != rows_at[1]", "rows_at[0] > rows_at[1]", WITNESS),
    Mutation("reshard/live", "id(room) not in seen and (", "False and (", WITNESS),
    Mutation("reshard/live", "            room.data = data\n", "            pass\n", WITNESS),
    Mutation("reshard/live", "quantization.moe_kernel = None", "pass", RECEIVER),
    Mutation("reshard/live", "poison(self.model, self.problem)", "pass", RECEIVER),
    Mutation("reshard/live", 'vars(model).pop("compute_logits", None)', "pass", RECEIVER),
    Mutation("reshard/live", "filter(None, problems)", "filter(None, problems[-1:])", RECEIVER),
    Mutation("reshard/live", "in names:\n            prefix", "in names[:1]:\n            prefix", RECEIVER),
    Mutation("reshard/live", "    engine.resume(version)\n", "", RECEIVER),
)  # fmt: skip


def place_of(mutation: Mutation, root: Path) -> Path:
    """The one file that has a mutation's text. Raises ValueError unless exactly one has it, once."""
    texts = [*(root / mutation.folder).rglob("*.py"), *(root / mutation.folder).rglob("*.toml")]
    files = [file for file in sorted(texts) if mutation.old in file.read_text()]
    count = sum(file.read_text().count(mutation.old) for file in files)
    if count != 1:
        raise ValueError(f"{mutation.old!r} is {count} times in {mutation.folder}/, and should be there once")
    return files[0]


def failed(root: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails in a copy of the repository, None if all pass.

    Raises RuntimeError if the tests cannot be collected: that shows nothing.
    """
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
        return None
    if done.returncode == pytest.ExitCode.INTERRUPTED:
        raise RuntimeError(f"{' '.join(tests)} could not be collected:\n{done.stdout[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"pytest ended with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the numbers of some mutations, from 0")
    parser.add_argument("--list", action="store_true", help="list them, and run no test")
    parser.add_argument("--quick", action="store_true", help="run the tests of make test alone")
    arguments = parser.parse_args()
    chosen = list(map(int, arguments.only.split(","))) if arguments.only else range(len(MUTATIONS))
    places = [place_of(mutation, ROOT).relative_to(ROOT) for mutation in MUTATIONS]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="reshard-mutations-") as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, root / name)
        for number in chosen:
            mutation, file = MUTATIONS[number], root / places[number]
            line = f"{number:3} {places[number]}: {' '.join(mutation.old.split())}"
            if arguments.list:
                print(line)
                continue
            before, began = file.read_text(), time.monotonic()
            file.write_text(before.replace(mutation.old, mutation.new))
            by = failed(root, [*mutation.tests, *(("-m", "not thorough") if arguments.quick else ())])
            file.write_text(before)
            survived += by is None
            answer = f"caught by {by}" if by else "SURVIVED"
            print(f"{line}\n    {answer} ({time.monotonic() - began:.0f} s)", flush=True)
    sys.exit(1 if survived else 0)


if __name__ == "__main__":
    main()
