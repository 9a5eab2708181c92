"""The comparison of shards with the original model by running both on the same tokens.

The original runs whole, in its own dtype and in higher precision; the shards run on as many ranks as they are for, each
of which loads only its own folder. Hidden states throughout the model and the outputs are compared; see
verify/forward/noise.py for what counts as equal. This module starts the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch

from reshard.formats.errors import CheckpointError, ReshardError, refused, require_transformers
from reshard.formats.files.checkpoint import open_checkpoint
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.store import local_folder, local_path
from reshard.formats.torch_internals import TORCH_DTYPES
from reshard.mesh.plan import Plan, make_plan
from reshard.model.binding import belonging_of, bind
from reshard.model.model import FullTensor, padding_for
from reshard.source.source import Source
from reshard.system import check_space
from reshard.text import plural
from reshard.verify.bytes.rules import own_rules
from reshard.verify.forward.job import ForwardOptions, Job, Needs, needs_of, run_plan
from reshard.verify.forward.launch import check_ranks, run_ranks
from reshard.verify.forward.report import ForwardReport, report_of
from reshard.verify.rank.device import resolve
from reshard.verify.rank.group import RankAnswer
from reshard.verify.rank.roles import positions_of
from reshard.verify.run_settings import BYTES_ALONE, RunSettings, Unmerged

Progress = Callable[[str], None]
"""A function that is called with the name of the current step."""


DEFAULTS = ForwardOptions()


def run_forward(
    original: Source | Unmerged, shards: Source, options: ForwardOptions = DEFAULTS,
    progress: Progress = lambda _: None,
) -> ForwardReport:  # fmt: skip
    """Run the original and its shards, which may be a full checkpoint, and compare. Raises ReshardError."""
    return run(prepare(original, shards, options), progress)


def prepare(original: Source | Unmerged, shards: Source, options: ForwardOptions) -> Job:
    """Return the job of the ranks, after every check that is possible before they run. Raises ReshardError."""
    device, job = device_of(options), _job(original, shards, options)
    world = job.plan.mesh.size
    check_ranks(world)
    of_this_machine = needs_of(job, device).files * int(os.environ.get("LOCAL_WORLD_SIZE", world)) // world
    check_space(Path(gettempdir()), of_this_machine, "the ranks' folders", "set TMPDIR to a folder of another disk")
    return job


def run(job: Job, progress: Progress = lambda _: None) -> ForwardReport:
    """Start the ranks, and compare their results. Raises ReshardError."""
    device, world, options = device_of(job.options), job.plan.mesh.size, job.options
    progress(f"starting {plural(world, 'rank')}, {device}: {needs_of(job, device).headline}")
    # They import transformers.
    from reshard.formats.transformers_internals import quiet_transformers
    from reshard.verify.forward.shards import run_job

    try:
        with quiet_transformers(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False), ExitStack() as stack:
            # What is to be in float32 is computed in it: by default, convolutions are in TF32.
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
            results = run_ranks(run_job, world, job, device=device, timeout=options.timeout, progress=progress)
    except RankAnswer as answer:
        results = [answer.value]
    return report_of(job, results, device)


def needs(original: Source | Unmerged, shards: Source, options: ForwardOptions = DEFAULTS) -> Needs:
    """Return the memory that a comparison needs, after every check that is possible without a run. Raises
    ReshardError.
    """
    return needs_of(_job(original, shards, options), device_of(options))


def device_of(options: RunSettings) -> str:
    """The kind of device that the ranks compute on. Raises ReshardError for one that is not there."""
    device = resolve(options.device)
    if device == "cuda" and os.environ.get("NVIDIA_TF32_OVERRIDE", "0") != "0":
        message = "NVIDIA_TF32_OVERRIDE is set: a GPU then computes in TF32, with 10 bits, what is to be in float32"
        raise ReshardError(message, "unset it, or give --device cpu")
    return device


def dequantized(plan: Plan) -> Plan:
    """The plan of the same model on the same mesh, with plain weights in place of quantized ones."""
    model, plain_tensors, weights = plan.model, [], set()
    dtypes = {tensor.name: tensor.dtype for tensor in model.tensors}
    for tensor in model.tensors:
        belonging = belonging_of(tensor.name, dtypes, model.architecture, model.sizes)
        if belonging is None:
            plain_tensors.append(FullTensor(tensor.name, tensor.dtype, tensor.shape, "plan"))
        else:
            weights.add(belonging.weight)
    if not weights:
        return plan
    missing = sorted(weights - {tensor.name for tensor in plain_tensors})
    tensors = [*plain_tensors, *(FullTensor(name, "BF16", None, "plan") for name in missing)]
    plain = bind(model.architecture, model.config, tensors, axes=model.sizes.measured)
    return make_plan(plain, plan.mesh, padding=plan.padding)


def _job(original: Source | Unmerged, shards: Source, options: ForwardOptions) -> Job:
    require_transformers("the forward pass")
    if isinstance(original, Unmerged):
        return _job_with_adapter(original, shards, options)
    _check_kinds(original, shards)
    ids = _prompt(original, options.prompt) if options.prompt is not None else None
    stored = run_plan(shards)
    plan = dequantized(stored)
    if plan is not stored:
        _check_dequantizing(original, options)
    is_built_in = own_rules(stored, original.model.architecture) == ()
    dtype, is_loaded = _dtype(original, plan, options), _is_loaded(original)
    return Job(original, shards, plan, dtype, ids, options, is_built_in, is_written=not is_loaded)


def _job_with_adapter(original: Unmerged, shards: Source, options: ForwardOptions) -> Job:
    """A comparison with a base model and an adapter beside it."""
    require_transformers("the forward pass of an adapter", "peft")
    for name in ("backward", "streamed"):
        if getattr(options, name):
            raise refused(name, True, "an adapter is not run so", instead=({name: None},))
    base, is_alone = original.base, original.is_alone
    job = _job(base, base if is_alone else shards, options)
    if is_alone:
        theirs = run_plan(shards)
        padding = {**padding_for(base.model, theirs.mesh, 1), **theirs.padding}
        job = replace(job, shards=shards, plan=make_plan(base.model, theirs.mesh, padding=padding), is_alone=True)
    stored = _dtype(base, job.plan, replace(options, compute_dtype=None))
    return replace(job, adapter=original.adapter, stored=stored)


def _check_kinds(original: Source, shards: Source) -> None:
    if original.checkpoint is None:
        raise CheckpointError(
            f"{original.path} is split: the forward needs the full checkpoint that it is compared with"
        )
    if SETTINGS in original.model.config:
        raise CheckpointError(f"{original.path} is an adapter: it runs beside the model that it changes, not alone")
    if shards.plan.mesh.same_ranks and len({degree for name, degree in shards.plan.mesh.degrees if name != "pp"}) > 1:
        raise ReshardError(
            f"{shards.path}: experts are divided over more or fewer ranks than the rest ({shards.plan.mesh}), which "
            "the forward pass does not run",
            BYTES_ALONE,
        )


def _is_loaded(original: Source) -> bool:
    """Whether transformers loads exactly the chosen tensors from an original's folder, under the names that they have
    there.
    """
    checkpoint, folder = original.checkpoint, local_path(original.path)
    if checkpoint is None or checkpoint.note or checkpoint.renamed:
        return False
    files = {file.name for file in checkpoint.files}
    return not folder or files == {file.name for file in open_checkpoint(folder).files}


def _check_dequantizing(original: Source, options: ForwardOptions) -> None:
    """Raise ReshardError unless transformers can load a quantized checkpoint with plain weights."""
    from reshard.verify.rank.loading import dequantizing

    if options.backward:
        raise refused("backward", None, f"{original.path} is quantized, and such weights have no gradients")
    try:
        can = dequantizing(original.model.config)
    except ReshardError as error:
        raise ReshardError(f"{original.path} is {error.message}", BYTES_ALONE) from None
    if not can:
        raise ReshardError(f"{original.path} is quantized, and its config.json does not say how", BYTES_ALONE)


def _dtype(original: Source, plan: Plan, options: ForwardOptions) -> torch.dtype:
    """The dtype asked for, or the one of most of the checkpoint's numbers, scales and packed ones aside."""
    if options.compute_dtype is not None:
        asked_for: torch.dtype = getattr(torch, str(options.compute_dtype))
        return asked_for
    count, dtypes = dict[torch.dtype, int](), (torch.float32, torch.bfloat16, torch.float16)
    for name, tensor in original.ranks[0].items():
        dtype = TORCH_DTYPES.get(tensor.dtype) if name in plan.layouts else None
        if dtype in dtypes:
            count[dtype] = count.get(dtype, 0) + tensor.nbytes
    return max(count, key=lambda dtype: count[dtype], default=torch.float32)


def _prompt(original: Source, text: str) -> Any:
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(local_folder(original.path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{original.path}: no tokenizer for a prompt", "add one, or drop --prompt") from error
    ids, limit = tokenizer(text, return_tensors="pt")["input_ids"], positions_of(original.model)
    if ids.numel() == 0:
        raise refused("prompt", None, "it has no tokens")
    if limit is not None and ids.shape[1] > limit:
        raise refused("prompt", None, f"it has {ids.shape[1]:,} tokens, and the model positions for {limit:,}")
    return ids
