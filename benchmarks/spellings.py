"""The small models of tests/zoo under the names that others give their tensors: as published, and of modules.

    python -m benchmarks.spellings RESULTS [--models llama,gpt2] [--spellings hub,state_dict] [--containers plain,dcp]
                                   [--jobs 2]

Each model is stored once in each spelling and merged to its published names. A result is ``right`` if these names and
all bytes are the published checkpoint's, ``refused`` with the message, ``names`` if the same tensors have other names,
``wrong`` if a tensor lacks or has another value. What transformers' class stores is compared with what it saves as the
published form. RESULTS, a file with a line of JSON for each, is added to; what it has is not run again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file

import reshard
from reshard.formats.errors import ReshardError
from tests import zoo

State = dict[str, torch.Tensor]
RANK = 2


@dataclass(frozen=True)
class Result:
    """What was found of a model in a spelling and a container: ``verdict`` and, if it is not right, ``why``."""

    model: str
    spelling: str
    container: str
    verdict: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.model:28} {self.spelling:34} {self.container:5} {self.verdict:8} {self.why}".rstrip()


class Original:
    """A small model: its published checkpoint, and what its class in transformers holds and saves."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        self.folder = zoo.save(name, root / "published")

    @cached_property
    def published(self) -> State:
        return contents(self.folder)

    @cached_property
    def _model(self) -> transformers.PreTrainedModel:
        return self._loaded(self.folder)

    def _loaded(self, folder: Path) -> transformers.PreTrainedModel:
        model: transformers.PreTrainedModel = zoo.class_of(folder).from_pretrained(folder, dtype="auto")
        return model

    @cached_property
    def modules(self) -> State:
        """The class's state dict."""
        return {key: value.detach().clone() for key, value in self._model.state_dict().items()}

    @cached_property
    def saved(self) -> State:
        """The same as a published checkpoint: ties are made, and numbers that the class drops are not there."""
        self._model.save_pretrained(self.root / "saved")
        return contents(self.root / "saved")

    @cached_property
    def saved_as_modules(self) -> State:
        self._model.save_pretrained(self.root / "modules", save_original_format=False)
        return contents(self.root / "modules")

    @cached_property
    def adapted(self) -> tuple[State, State, Path]:
        """Its state dict with a LoRA adapter on all linear layers, the published checkpoint with the adapter merged,
        and the file of the adapter's settings. All factors are powers of two, so that sums are exact. Raises ValueError
        if PEFT refuses.
        """
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
        model = get_peft_model(self._loaded(self.folder), settings)
        model.peft_config["default"].base_model_name_or_path = None
        generator = torch.Generator().manual_seed(1)
        for key, value in model.named_parameters():
            if "lora_" in key:
                value.data = 2.0 ** -torch.randint(1, 4, value.shape, generator=generator)
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        model.merge_and_unload().save_pretrained(self.root / "adapted")
        model.peft_config["default"].save_pretrained(self.root / "adapted")
        return state, contents(self.root / "adapted"), self.root / "adapted" / "adapter_config.json"


def contents(folder: Path) -> State:
    """All tensors of a folder's safetensors."""
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def below(beginning: str) -> Callable[[State], State]:
    """The names below a beginning."""
    return lambda state: {beginning + key: value for key, value in state.items()}


def wrapped(word: str) -> Callable[[State], State]:
    """The names with a wrapper's word behind each number, as each layer is wrapped."""
    return lambda state: {re.sub(r"(\.\d+\.)", rf"\g<1>{word}.", key, count=1): state[key] for key in state}


def rooted(is_on: bool) -> Callable[[State], State]:
    """All names with the root ``model.``, or none."""
    return lambda state: {("model." if is_on else "") + key.removeprefix("model."): state[key] for key in state}


def other(state: State) -> State:
    """The tensors of another model of this kind."""
    return {key: value + 1 if value.is_floating_point() else value for key, value in state.items()}


def with_value_head(state: State) -> State:
    head = {"v_head.summary.weight": torch.ones(1, 8), "v_head.summary.bias": torch.ones(1)}
    return below("pretrained_model.")(state) | head


def with_states(state: State) -> State:
    kinds = ("exp_avg", "exp_avg_sq")
    return below("model.")(state) | {f"optim.state.{key}.{kind}": value for kind in kinds
                                     for key, value in other(state).items()}  # fmt: skip


def beside(beginning: str, **strangers: torch.Tensor) -> Callable[[State], State]:
    return lambda state: below(beginning)(state) | {key.replace("__", "."): value for key, value in strangers.items()}


ONE = torch.ones((), dtype=torch.int64)
BOTH: dict[str, Callable[[State], State]] = {
    "": lambda state: state,
    "module.": below("module."),
    "_orig_mod. in front": below("_orig_mod."),
    "_orig_mod. inside": wrapped("_orig_mod"),
    "checkpoint wrapper": wrapped("_checkpoint_wrapped_module"),
    "FSDP1 wrapper": wrapped("_fsdp_wrapped_module"),
    "pretrained_model. and a value head": with_value_head,
    "root on": rooted(True),
    "root off": rooted(False),
}
OF_RUNS: dict[str, Callable[[State], State]] = {
    "model.": below("model."),
    "actor.": below("actor."),
    "state.model. beside rng and step": beside("state.model.", rng=torch.ones(8, dtype=torch.uint8), step=ONE),
    "ema_params.shadow. beside n": beside("ema_params.shadow.", ema_params__n=ONE),
    "model. beside states": with_states,
    "model. beside ema.model.": lambda state: below("model.")(state) | below("ema.model.")(other(state)),
    "actor. and ref.": lambda state: below("actor.")(state) | below("ref.")(other(state)),
}
HUB, MODULES, SAVED, LORA, TWO = "hub", "state_dict", "save_original_format=False", "LoRA", "actor. and ref."
SPELLINGS = (
    *(f"{HUB} {way}".strip() for way in BOTH), SAVED, *(f"{MODULES} {way}".strip() for way in (*BOTH, *OF_RUNS)), LORA,
)  # fmt: skip
"""Names of the cases: the spelling, and what is done to the names."""


def stored(original: Original, spelling: str) -> tuple[State, State, Path | None]:
    """What is stored in a spelling, the published checkpoint that it should be, and the settings of an adapter."""
    if spelling == LORA:
        return original.adapted
    if spelling == SAVED:
        return original.saved_as_modules, original.saved, None
    names, _, way = spelling.partition(" ")
    state, wanted = (original.published, original.published) if names == HUB else (original.modules, original.saved)
    return {**BOTH, **OF_RUNS}[way](state), wanted, None


def store(state: State, container: str, folder: Path, original: Original, settings: Path | None) -> None:
    """Write tensors into a folder, as safetensors with a config.json or as torch's distributed checkpoint."""
    folder.mkdir()
    state = {key: value.clone().contiguous() for key, value in state.items()}
    if container == "dcp":
        dcp.save(state, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]
    else:
        shutil.copy(original.folder / "config.json", folder)
        save_file(state, folder / "model.safetensors", {"format": "pt"})
    if settings is not None:
        shutil.copy(settings, folder)


def result(original: Original, spelling: str, container: str) -> Result:
    """Store a model in a spelling, and merge it to its published names."""
    case = original.name, spelling, container
    try:
        state, wanted, settings = stored(original, spelling)
    except ValueError as error:
        return Result(*case, "none", str(error).splitlines()[0])
    with tempfile.TemporaryDirectory(dir=original.root) as place:
        run, given = Path(place) / "run", {"quiet": True} | ({"config": original.folder} if container == "dcp" else {})
        store(state, container, run, original, settings)
        if spelling.endswith(TWO):
            try:
                merged(run, Path(place) / "out", given)
            except ReshardError as error:
                if "two models" not in error.message:
                    return Result(*case, "refused", _plain(error, place))
            else:
                return Result(*case, "wrong", "one of two models was taken")
            given |= {"weights": "actor"}
        try:
            found = merged(run, Path(place) / "out", given)
        except ReshardError as error:
            return Result(*case, "refused", _plain(error, place))
    held = () if spelling.startswith(HUB) else original.modules.values()
    return Result(*case, *verdict(found, wanted, held))


def merged(run: Path, out: Path, given: dict[str, object]) -> State:
    """The tensors of a run with their published names."""
    try:
        reshard.merge(run, out, names="published", **given)
    except ReshardError as error:
        if "there is nothing to merge" not in error.message:
            raise
        return {key: value.clone() for key, value in reshard.tensors(run, **given)}
    return contents(out)


def _plain(error: ReshardError, place: str) -> str:
    return error.message.replace(place + "/", "")


def verdict(found: State, wanted: State, held: Iterable[torch.Tensor] = ()) -> tuple[str, str]:
    """Whether tensors are those that are wanted. A value head around the model is left out; what else is ``held`` by a
    class, such as a second name, has its value.
    """
    found = {key: value for key, value in found.items() if "v_head." not in key}
    if differing := [key for key in wanted.keys() & found.keys() if not equal(found[key], wanted[key])]:
        return "wrong", f"'{min(differing)}' has another value"
    lacking, more = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())

    def are_among(names: Iterable[str], ours: State, theirs: Iterable[torch.Tensor]) -> bool:
        return all(any(equal(ours[key], each) for each in theirs) for key in names)

    if not are_among(lacking, wanted, [*found.values()]) or not are_among(more, found, [*wanted.values(), *held]):
        return "wrong", f"not there: {lacking[:1]}, more: {more[:1]}"
    if lacking:
        return "names", f"'{lacking[0]}' is called '{more[0]}'" if more else f"'{lacking[0]}' is there once"
    return ("names", f"'{more[0]}' is there, too") if more else ("right", "")


def equal(one: torch.Tensor, another: torch.Tensor) -> bool:
    """Whether all bytes are the same."""
    is_alike = one.dtype == another.dtype and one.shape == another.shape
    return is_alike and torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, another)))


def check(name: str, cases: Sequence[tuple[str, str]]) -> list[Result]:
    """All cases of one model."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="reshard-spellings-") as root:
        original = Original(name, Path(root))
        return [_guarded(original, *case) for case in cases]


def _guarded(original: Original, spelling: str, container: str) -> Result:
    try:
        return result(original, spelling, container)
    except Exception as error:  # whatever it is, it is no refusal
        return Result(original.name, spelling, container, "wrong", f"{type(error).__name__}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--models", default=",".join(zoo.ZOO))
    parser.add_argument("--spellings", default=",".join(SPELLINGS))
    parser.add_argument("--containers", default="plain")
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    file: Path = arguments.results
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []
    done = {(r.model, r.spelling, r.container) for r in results}
    with ProcessPoolExecutor(arguments.jobs) as pool, file.open("a") as kept:
        runs = []
        for name in arguments.models.split(","):
            cases = [(s, c) for c in arguments.containers.split(",") for s in arguments.spellings.split(",")]
            cases = [case for case in cases if (name, *case) not in done]
            if cases:
                runs.append(pool.submit(check, name, cases))
        for each in as_completed(runs):
            for one in each.result():
                results.append(one)
                if one.verdict != "right":
                    print(one, flush=True)
                print(json.dumps(asdict(one)), file=kept, flush=True)
    print(to_markdown(results))


def to_markdown(results: Sequence[Result]) -> str:
    """The counts, by spelling; then the messages and differences, by what they say."""
    lines = ["| names | right | refused | other names | wrong |", "|---" * 5 + "|"]
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in results:
        counts[one.container, one.spelling][one.verdict] += 1
    for (container, spelling), count in counts.items():
        name = spelling if container == "plain" else f"{spelling}, {container}"
        lines.append(
            f"| {name} | " + " | ".join(str(count[each]) for each in ("right", "refused", "names", "wrong")) + " |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
