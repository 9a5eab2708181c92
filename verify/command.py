"""The command ``reshard verify``, for a Python caller too. The proof opens both checkpoints, compares bytes, and then
runs the model, unless the shards cannot be run.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from reshard.formats.documents import read_config
from reshard.formats.errors import CheckpointError, PlanError, ReshardError, refused, require_transformers
from reshard.formats.files.checkpoint import has_adapter
from reshard.formats.files.safetensors import CASTS, DTYPE_NAMES, stated_dtype
from reshard.formats.hints import synonym, with_hint
from reshard.formats.notation.architecture import SETTINGS
from reshard.formats.quantization.methods import quantization_settings
from reshard.formats.store import FilePath, local_folder
from reshard.source.access import Access, Place
from reshard.source.opening import find
from reshard.source.source import Source
from reshard.store.selection import Weights
from reshard.system import Taken, default, system_errors
from reshard.transforms.opening import open_any
from reshard.verify.bytes.comparison import ByteProgress, no_progress
from reshard.verify.bytes.exact import compare_bytes, open_shards, structure_of
from reshard.verify.bytes.exact_report import ExactReport
from reshard.verify.bytes.kept import is_known, is_quantized, stays_float32
from reshard.verify.bytes.rules import own_rules
from reshard.verify.bytes.structure import Structure
from reshard.verify.loader.ask import LoaderReport, UncheckedFormatError, ask, check_python, program_of
from reshard.verify.report.answer import Answer, OwnPlan, exact_summary
from reshard.verify.report.evidence import evidence_of
from reshard.verify.run_settings import BYTES_ALONE, RunSettings, Unmerged

if TYPE_CHECKING:
    from reshard.verify.engine.compare import EngineOptions
    from reshard.verify.forward.job import Job, Needs
    from reshard.verify.forward.launch import Crew


@dataclass(frozen=True)
class Display:
    """Shows a person how far the proof is; by default nobody.

    ``bytes`` is for the comparison of bytes: it yields what is called with the bytes that are done and the bytes in
    all. ``phases`` is for runs of the model: it yields what is called with the name of each phase as it begins.
    """

    bytes: Callable[[], AbstractContextManager[Callable[[int, int], None]]] = lambda: nullcontext(no_progress)
    phases: Callable[[], AbstractContextManager[Callable[[str], None]]] = lambda: nullcontext(lambda phase: None)


SILENT = Display()


def verify(request: VerifyRequest) -> Answer:
    """Prove that shards are the model of a full checkpoint: compare the bytes, then run the model.

    The answer's ``verdict`` is ``same``, ``different`` or ``without effect``: of an adapter without which the outputs
    would be the same. Raises ReshardError for what cannot be checked.
    """
    answer = request.begin()
    attempt(answer, request, Display(lambda: nullcontext(request.progress)))
    if answer.error is not None and answer.exit_code == 2:
        if answer.exact is not None:
            answer.error.add_note(exact_summary(answer.exact))
        raise answer.error
    return answer


def attempt(answer: Answer, request: VerifyRequest, display: Display, crew: Crew | None = None) -> None:
    """Fill in an answer; if something cannot be checked, with the error. ``crew``: this process is one of the ranks
    that a launcher started; the first of them compares the bytes.
    """
    try:
        with system_errors():
            _check_machine(request)
            _prove(answer, request, display, crew)
    except ReshardError as error:
        answer.error = error


def _prove(answer: Answer, request: VerifyRequest, display: Display, crew: Crew | None) -> None:
    """Open both checkpoints, compare the bytes and, if that is wanted and possible, run the model.

    Raises ReshardError for what cannot be checked.
    """
    original, place, shards = _open(request)
    answer.plan = _own_plan(original, shards, request)
    can_run, job, structure = False, None, None
    wants_forward = answer.wants_forward and not original.is_split
    if original.is_split and (request.engine is not None or request.loader is not None):
        raise _not_run(request)
    if answer.wants_forward and original.is_split:
        answer.notes.append(f"No forward pass was run: {_not_run(request).message}.")
    if crew is None or crew.is_first:
        structure = shards if isinstance(shards, ExactReport) else structure_of(original, shards)
        if isinstance(structure, ExactReport):
            answer.exact = structure
        else:
            if not (structure.missing or structure.problems):
                job = _forward_job(request, original, structure.shards) if wants_forward else None
                if request.engine is not None:
                    from reshard.verify.engine.compare import check_run  # torch

                    check_run(original, structure.shards, _engine_options(request))
            if request.loader is not None and isinstance(shards, Source):
                with _timed(answer, "loader"), display.phases() as say:
                    answer.loader = _ask(request.loader, original, shards, say)
            with _timed(answer, "bytes"), display.bytes() as compared:
                answer.exact = compare_bytes(structure, compared)
            can_run = answer.exact.comparable
            if not can_run and wants_forward:
                answer.notes.append("The forward was not run: these are not the original's tensors.")
    is_wanted = can_run and wants_forward
    if crew is not None:
        is_wanted = crew.agree(is_wanted)
    if is_wanted:
        if isinstance(shards, ExactReport):  # the first rank has opened others, on a disk of its own
            which = f"rank {crew.rank}" if crew is not None else "this rank"
            raise ReshardError(f"{which}: {'; '.join(shards.problems)}")
        from reshard.verify.forward.compare import run  # torch

        with _timed(answer, "forward"), display.phases() as say:
            job = job or _forward_job(request, original, shards)
            is_equal = answer.exact is not None and answer.exact.verdict == "same"
            answer.forward = run(replace(job, has_equal_bytes=is_equal), say)
    if can_run and request.engine is not None and not isinstance(shards, ExactReport):
        from reshard.verify.engine.compare import run_engine  # torch

        with _timed(answer, "engine"), display.phases() as say:
            answer.engine = run_engine(original, shards, _engine_options(request), say)
    if answer.exit_code == 1:
        answer.notes += _advice(original, place, shards, structure)
    if isinstance(shards, Source) and answer.exact is not None:
        is_split_word = request.dtype is not None and not is_known(original.model.config)
        sizes = structure.sizes_of_split if isinstance(structure, Structure) else ()
        answer.evidence = [*evidence_of(answer, original, shards, "dtype" if is_split_word else None, sizes)]
    if answer.loader is not None and answer.loader.unchecked is not None:
        raise UncheckedFormatError(answer.loader.unchecked)
    if request.loader is not None and answer.loader is None and isinstance(shards, ExactReport):
        answer.notes.append("The loader was not asked: no file says of which mesh these are.")


def _check_machine(request: VerifyRequest) -> None:
    """Raise ReshardError where this machine lacks what a run takes. Nothing of the checkpoints is read."""
    if not request.exact_only:
        require_transformers("the forward pass", *(["peft"] if request.adapter is not None else []))
        from reshard.verify.forward.compare import device_of  # torch

        device_of(request)
    if request.engine is not None:
        require_transformers("the engine's run")
        check_python("engine_python", _engine_options(request).python, request.engine)


def _not_run(request: VerifyRequest) -> CheckpointError:
    """Return an error that says why the original does not run: it is split, or a trainer's own form."""
    message = f"{request.original} is not a full checkpoint, and only one can run"
    return CheckpointError(message, "'reshard merge' writes one of it: give that")


def _ask(python: str, original: Source, shards: Source, progress: Callable[[str], None]) -> LoaderReport:
    """The word of the own loader of the program that the shards are for. Raises ReshardError."""
    form = "reshard's own folders" if shards.format.plain else f"the format '{shards.format.name}'"
    program = program_of(shards.format.loading.engine, shards.path, form)
    check_python("loader", python, program)
    held = Counter(tensor.dtype for tensor in original.model.tensors if tensor.dtype in DTYPE_NAMES)
    dtype = stated_dtype(original.model.config) or next((dtype for dtype, _ in held.most_common(1)), None)
    folders = (local_folder(original.path), local_folder(shards.path))
    mesh, name = shards.plan.mesh, DTYPE_NAMES[dtype] if dtype else None
    degrees = dict(mesh.degrees)
    degrees["etp"] = 1 if mesh.same_ranks else degrees.get("tp", 1)
    return ask(python, program, *folders, degrees, name, shards.format.loading.engine_format, progress)


def _engine_options(request: VerifyRequest) -> EngineOptions:
    from reshard.verify.engine.compare import EngineOptions  # torch

    python, dtype = request.engine_python or sys.executable, str(request.compute_dtype or "float32")
    return EngineOptions(python, dtype, seed=request.seed)


def _forward_job(request: VerifyRequest, original: Source, shards: Source) -> Job:
    """Return the job of the ranks in the forward pass. Raises ReshardError if the model cannot be run."""
    from reshard.verify.forward.compare import prepare  # torch
    from reshard.verify.forward.job import ForwardOptions

    options = {name: getattr(request, name) for name in _OF_A_RUN}
    return prepare(_unmerged(request, original) or original, shards, ForwardOptions(**options))


@contextmanager
def _timed(answer: Answer, what: str) -> Iterator[None]:
    started = time.monotonic()
    yield
    answer.seconds[what] = time.monotonic() - started


def _own_plan(original: Source, shards: Source | ExactReport, access: Access) -> OwnPlan | None:
    """The plan that is not a built-in one: the user's file, or the rules that the shards say they were split by."""
    if isinstance(shards, ExactReport):
        return None
    modules = original.model.architecture if not original.is_split else None  # they are for a forward
    differences = own_rules(shards.plan, modules)
    if access.plan_file is None and not differences:
        return None
    name = str(access.plan_file) if access.plan_file is not None else f"of {shards.path}"
    return OwnPlan(name, str(original.model.config.get("model_type")), differences)


# ------------------------------------------------------------------------------------------------------------ a request


_OF_A_RUN = tuple(field.name for field in fields(RunSettings))


@dataclass(frozen=True)
class VerifyRequest(Access, RunSettings):
    """Arguments of ``verify``.

    With ``adapter``, the original is the model with that LoRA adapter: merged for the bytes, beside it as it runs.

    ``original``: the full checkpoint: a folder, a Hub id or a URL.
    ``shards``: what was made of it, in any format.
    ``exact_only``: only bytes are compared.
    ``engine``: ``vllm``: it runs the shards as well.
    ``engine_python``: the Python interpreter that the engine is installed for.
    ``loader``: the Python interpreter of the program that loads the shards' format: its own loader is asked.
    ``progress``: True for a bar, or a function of the bytes compared so far and the total.
    """

    original: Place = field(repr=False)  # a URL may have a password
    shards: Place = field(repr=False)  # a URL may have a password
    _: KW_ONLY
    exact_only: bool = False
    engine: str | None = None
    engine_python: str | None = None
    loader: str | None = None
    progress: Taken[ByteProgress | bool, ByteProgress] = default(no_progress)

    def __post_init__(self) -> None:
        super().__post_init__()
        stated = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        if self.engine not in {None, "vllm"}:
            raise refused("engine", self.engine, "the engine is vllm")
        if self.engine is None and self.engine_python is not None:
            raise refused("engine_python", None, "no engine is asked for", instead=({"engine": None},))
        computed = next((name for name in ("dequantize", "patch", "quantize", "dtype") if getattr(self, name)), None)
        if computed is not None and (not self.exact_only or self.engine is not None or self.loader is not None):
            advice = "to run or load the model, write it with 'reshard split --as huggingface' first, and give that"
            instead = () if self.exact_only else ({"exact_only": True},)
            raise refused(computed, None, "with it, only bytes can be compared", instead=instead, advice=advice)
        of_a_run = stated & {*_OF_A_RUN} - ({"compute_dtype", "seed"} if self.engine is not None else set())
        if self.exact_only and of_a_run:
            raise refused(min(of_a_run), None, "no forward pass runs", beside={"exact_only": True})
        if self.streamed and self.backward:
            raise refused("streamed", None, "gradients need the whole model at once", beside={"backward": None})
        if self.engine is not None and self.adapter is not None:
            raise refused(
                "engine", self.engine, "an engine runs no base model with its adapter", beside={"adapter": None}
            )
        if self.loader is not None and self.adapter is not None:
            raise refused("loader", None, "it loads no adapter into the base model", beside={"adapter": None})
        if self.prompt is not None and (of_tokens := stated & {"batch", "seq", "seed"}):
            raise refused(min(of_tokens), None, "a prompt replaces the random tokens", beside={"prompt": None})

    def begin(self) -> Answer:
        """The answer, before anything is checked."""
        options: dict[str, Any] = {name: getattr(self, name) for name in _OF_A_RUN}
        options = {"exact_only": True} if self.exact_only else options
        return Answer(str(self.original), str(self.shards), options, with_engine=self.engine is not None)


def needs(request: VerifyRequest) -> Needs:
    """Return the memory that the forward pass needs: both checkpoints are opened, and nothing is compared. Raises
    ReshardError.
    """
    if request.exact_only:
        raise ReshardError("--dry-run says what a forward pass needs, and --exact-only runs none", "leave one out")
    _check_machine(request)
    original, _, shards = _open(request)
    if original.is_split:
        raise _not_run(request)
    if isinstance(shards, ExactReport):
        raise CheckpointError(shards.problems[0])
    from reshard.verify.forward.compare import needs as needs_of  # torch
    from reshard.verify.forward.job import ForwardOptions

    return needs_of(_unmerged(request, original) or original, shards, ForwardOptions(**request.begin().options))


def _open(request: VerifyRequest) -> tuple[Source, FilePath, Source | ExactReport]:
    is_run = not request.exact_only or request.engine is not None or request.loader is not None
    weights = Weights.FILES if is_run or request.download else Weights.RANGES
    try:
        original = open_any(request.original, replace(request, dtype=None, quantize=None), weights)
        if request.quantize is not None:
            original = _quantized(original, request.quantize)
        if original.is_split and original.checkpoint is None:
            from reshard.transforms.tensors import merged  # numpy

            original = merged(original)
        if request.dtype is not None:
            original = _cast(original, str(request.dtype))
    except PlanError as error:
        if request.plan_file is not None:
            raise
        hint = "if the shards were split with --plan FILE, give it here, too"
        raise PlanError(error.message, with_hint(hint, error.hint or "")) from error
    access: Access = request
    place = find(request.shards, replace(request, revision=None), weights)
    return original, place, open_shards(place, original, plan_file=access.plan_file)


def _quantized(original: Source, name: str) -> Source:
    """The original, of which verify says itself what is quantized."""
    from reshard.transforms.quantize import quantize  # numpy

    return quantize(original, name, lambda tensor: None if is_quantized(tensor) else "the rest")


def _cast(original: Source, name: str) -> Source:
    """The original in another dtype; of known types verify says itself what stays in float32."""
    from reshard.transforms.cast import cast  # numpy

    config = original.model.config
    return cast(original, name, stays_float32(config, synonym(name)) if is_known(config) else None)


def _unmerged(request: VerifyRequest, original: Source) -> Unmerged | None:
    """The base model and the adapter beside it, if the original is an adapter or has one in it. Raises ReshardError."""
    plain = replace(request, adapter=None, config=None, plan_file=None)
    if original.was_adapted:
        what = f"{request.original} has its LoRA adapter among its weights, which PEFT does not load"
        raise CheckpointError(what, f"'reshard merge RUN OUT' writes a model that runs, to verify with; {BYTES_ALONE}")
    if request.adapter is not None:
        adapter = find(request.adapter, replace(plain, revision=None), Weights.FILES)
        if not has_adapter(adapter):
            hint = f"'reshard split RUN ADAPTER --as peft' writes a folder that it loads; {BYTES_ALONE}"
            raise CheckpointError(f"{adapter} has a LoRA adapter in a form that PEFT does not load", hint)
        base = open_any(request.original, replace(plain, plan_file=request.plan_file), Weights.FILES)
        return Unmerged(base, local_folder(adapter), is_alone=False)
    settings = original.model.config.get(SETTINGS)
    if not isinstance(settings, dict) or original.is_split:
        return None
    folder = request.config or settings.get("base_model_name_or_path") or original.path
    try:
        base = open_any(folder, replace(plain, revision=None), Weights.FILES)
    except ReshardError as error:
        hint = f"give the model with --config BASE; {BYTES_ALONE}"
        raise CheckpointError(f"an adapter runs beside its base model: {error.message}", hint) from error
    return Unmerged(base, local_folder(original.path), is_alone=True)


def _advice(
    original: Source, place: FilePath, shards: Source | ExactReport, structure: Structure | ExactReport | None
) -> Iterator[str]:
    """The option with which shards were split, perhaps: if one side alone is quantized, or some of their tensors have
    another dtype than planned, which the original has not.
    """
    with suppress(ReshardError):  # it was said what is wrong with them
        config = shards.read_config() if isinstance(shards, Source) else read_config(place / "config.json")
        is_quantized, was = (bool(quantization_settings(settings)) for settings in (config, original.model.config))
        if is_quantized != was:
            what = "The original is quantized, these are not" if was else "These are quantized, the original is not"
            option = "--dequantize" if was else "--quantize fp8-block"
            yield f"{what}. If they were split with {option}, give it here, too."
            return
    if isinstance(structure, Structure) and original.cast is None:
        own = {info.dtype for of in original.ranks for info in of.values()}
        for name in [name for name, dtype in CASTS.items() if dtype in structure.other_dtypes - own][:1]:
            yield f"These have weights in {name}, the original has none. If it was cast, give --dtype {name}, too."
