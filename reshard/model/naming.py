"""The names of one model's tensors among stored names, whatever stands before or within them.

A trainer saves a model below a prefix (``model.``, ``state.model.``, ``actor.``), and wrappers put words of their own
into its names (``_orig_mod``). Two prefixes that claim the same tensors are two models. Only the words of a prefix
(``ema``, ``optim``) or the user say which one is meant: neither order nor length.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar

from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.hints import with_hint
from reshard.formats.notation.architecture import is_index, numbers_in, without_numbers
from reshard.formats.notation.spellings import Spellings
from reshard.formats.wrappers import WRAPPERS, without_wrappers

if TYPE_CHECKING:
    from reshard.model.model import Model

TOP = "/"
"""The user's word for the empty prefix."""
_DEEPEST = 6
_AVERAGE = re.compile(r"(?:ema|swa|avg|average|averaged)(?:_.*)?")
_OF_OPTIMIZER = re.compile(
    r"(?:optim|optimizer|optimizers|(?:max_)?exp_avg|momentum|master|fp32|grad|grads|gradients)(?:_.*)?"
)
_LORA = re.compile(r"(?:.*\.)?lora_(?:[AB]|embedding_[AB]|magnitude_vector)(?:\..*)?")
_OPTIMIZERS = ("optim", "optimizer", "optimizers")
_OF_TRAINER = re.compile(
    r"rngs?|rng_states?(_\d+)?|(global_)?steps?|epochs?|(lr_|grad_|loss_)?(scheduler|scaler)s?|dataloader|n_averaged"
)


class ChoiceError(CheckpointError):
    """A model is chosen that is not there."""


class SeveralError(CheckpointError):
    """Several models are there, or parts of one: ``is_all`` if each name is a tensor of one of them."""

    is_all = False


class LoraError(CheckpointError):
    """A LoRA adapter is among the weights: it is opened apart from its base (``reshard.source.lora``)."""


T = TypeVar("T")


@dataclass(frozen=True)
class Naming:
    """The tensors of one model among stored names."""

    beginning: str
    """The beginning of most of these names, without wrappers."""
    known: Mapping[str, str]
    """The stored name of each tensor of the model, by its plain name."""
    others: Mapping[str, frozenset[str]]
    """The stored names of each other set of the same tensors (averages and states among them), by their beginning."""

    @property
    def left_behind(self) -> tuple[str, ...]:
        """The other sets, in a few words."""
        return tuple(dict.fromkeys(beginning.partition(".")[0] for beginning in self.others))

    def of(self, stored: Mapping[str, T]) -> Iterator[tuple[str, T]]:
        """Yield stored things with their names in the model, without those of other sets; unknown ones keep their
        names.
        """
        names = {at: name for name, at in self.known.items()}
        return ((names.get(name, name), each) for name, each in stored.items() if not self.is_other(name))

    def without_strangers(self, names: Mapping[str, str]) -> Naming:
        """The same, with what a trainer keeps beside the model among the other sets (``rng``, ``optim.state.…``).

        ``names`` are as in ``name_all``. Any other tensor that is not known, and any other weight or bias, stays.
        """
        known, strangers = {*self.known.values()}, defaultdict[str, set[str]](set)
        for stored, name in names.items():
            top, around = name.partition(".")[0], f"{name.rpartition('.')[0]}."
            is_counter = _role(around) == "average" and any(  # of an average: ema_params.n
                beginning.startswith(around) for beginning in (self.beginning, *self.others)
            )
            is_trainers = is_counter or _OF_TRAINER.fullmatch(top) is not None
            is_trainers = top in _OPTIMIZERS or (is_trainers and not name.endswith((".weight", ".bias")))
            is_behind = bool(self.beginning) and name.startswith(self.beginning)
            if is_trainers and not is_behind and stored not in known and not self.is_other(stored):
                strangers[top].add(stored)
        return replace(self, others={**self.others, **{top: frozenset(own) for top, own in strangers.items()}})

    def is_other(self, stored: str) -> bool:
        """Whether a stored name belongs to a tensor of another set."""
        return any(stored in names for names in self.others.values())

    @property
    def note(self) -> str | None:
        """The difference between the stored names and the model's, in a few words; None if there is none."""
        words = [self.beginning] if self.beginning else []
        words += [f"{word}." for word in WRAPPERS if any(f"{word}." in stored for stored in self.known.values())]
        return f"names are written without {' and '.join(map(repr, words))}" if words else None


Spell = Callable[[str], str | None]
"""The one spelling of a plain name of a tensor; None if it is none of the model's."""


def name_all(where: object, names: Mapping[str, str], spell: Spell, weights: str | None = None) -> Naming:
    """Find the model among ``names``: the stored ones, each with its name without wrappers.

    The tensors that are known have the names that ``spell`` gives. ``weights`` is the beginning that the user chose,
    with or without its dot. Raises CheckpointError if there is no model, if several are equally good, and for a LoRA
    adapter inside it.
    """
    found = _models(names, spell)
    models = _of_best_role(found)
    chosen = next(iter(models), "")
    if weights is not None:
        chosen = "" if weights in ("", TOP) else f"{weights.removesuffix('.')}."
        if chosen not in found:
            there = f", they are {' and '.join(map(_place, found))}" if found else ""
            raise ChoiceError(f"{where}: no tensors of this model are {_place(chosen)}{there}")
    if chosen not in found:
        refuse_lora(where, names)
        first = min(names.values(), default="nothing")
        if are_states(names.values()):
            raise CheckpointError(f"{where} has states of an optimizer ('{first}'), and no model")
        hint = "is config.json that of these tensors?" if names else None
        raise CheckpointError(f"{where} holds '{first}', and no tensor of this model", hint)
    refuse_lora(
        where, names.keys() - {stored for tensors in found.values() for each in tensors.values() for stored in each}
    )
    if weights is None and _role(chosen) == "optimizer":
        raise CheckpointError(
            f"{where} has states of an optimizer ('{chosen}…'), and no model",
            f"if these are the weights, choose them: --weights {shlex.quote(chosen[:-1])}",
        )
    if weights is None and len(models) > 1:
        overlap = len({name for b in models for name in found[b]}) < sum(len(found[b]) for b in models)
        what = f"{'two' if len(models) == 2 else len(models)} models" if overlap else "parts of one model or of several"
        counts = ", ".join(f"{len(found[b]):,} {'' if n else 'tensors are '}{_place(b)}" for n, b in enumerate(models))
        choices = " or ".join(f"--weights {shlex.quote(b[:-1] or TOP)}" for b in models)
        several = SeveralError(f"{where} has {what}: {counts}", f"choose one: {choices}")
        several.is_all = sum(len(stored) for b in models for stored in found[b].values()) == len(names)
        raise several
    twice = next((all_of_it for all_of_it in found[chosen].values() if len(all_of_it) > 1), ())
    if twice:
        raise CheckpointError(f"{where} has two tensors of one name, '{twice[0]}' and '{twice[1]}'")
    known, others = {name: stored for name, (stored, *_) in found[chosen].items()}, dict[str, frozenset[str]]()
    for beginning, tensors in found.items():
        if beginning == chosen:
            continue
        owners = [b for b in found if _is_beside(beginning, b, found) and not _is_beside(b, chosen, found)]
        if owners == [chosen]:
            if both := next(((known[name], *stored) for name, stored in tensors.items() if name in known), None):
                raise CheckpointError(f"{where} has two tensors of one name, '{both[0]}' and '{both[1]}'")
            known |= {name: stored for name, (stored, *_) in tensors.items()}
        else:
            others[beginning] = frozenset(stored for all_of_it in tensors.values() for stored in all_of_it)
    plain = {stored: name for name, stored in known.items()}
    return Naming(chosen, {plain[stored]: stored for stored in names if stored in plain}, others)


def refuse_lora(where: object, names: Iterable[str]) -> None:
    """Raise LoraError if one of these names, without wrappers, is a LoRA adapter's."""
    lora = min(filter(_LORA.fullmatch, names), default=None)
    if lora is not None:
        raise LoraError(
            f"{where} has a LoRA adapter among its weights ('{lora}'), which is not read here",
            "merge it first: reshard merge RUN OUT",
        )


def known_forms(names: Iterable[str], spell: Spell) -> set[str]:
    """The names, without wrappers and numbers, that are of the model, behind whatever beginning."""
    return set[str]().union(*_claims(_forms(names), spell).values())


def explained(error: ReshardError, where: object, names: Iterable[str], spellings: Spellings) -> ReshardError:
    """The error for tensors of these names, behind whatever beginning, with what their spelling explains: they are of
    modules beside those that these are made of, or may be of modules that cannot be read.
    """
    names = [*map(without_wrappers, names)]

    def first(is_one: Callable[[str], bool]) -> str:
        return min(known_forms(names, lambda name: name if is_one(name) else None), default="")

    if (of_modules := first(spellings.is_joined)) and (apart := first(spellings.is_apart)):
        return CheckpointError(
            f"{where} has names of two spellings: '{of_modules}' of transformers' modules, '{apart}' of published "
            "checkpoints",
            "save the one model alone, with the names of one of them",
        )
    if spellings.refusal is None or spellings.refusal in error.message:
        return error
    why = f"if these are the names of transformers' modules: this type's cannot be read, as {spellings.refusal}"
    return type(error)(error.message, with_hint(why, error.hint or ""))


def are_states(names: Iterable[str]) -> bool:
    """Whether all names, without wrappers, are those of an optimizer's states."""
    names = list(names)
    return bool(names) and all(_role(name) == "optimizer" for name in names)


def _models(names: Mapping[str, str], spell: Spell) -> dict[str, dict[str, list[str]]]:
    """The sets of tensors of the model, by their beginnings: of each plain name the stored ones. Those with most names
    come first; of several that explain the same names, that without a role, then the shortest.
    """
    stored_of = defaultdict[str, list[str]](list)
    for stored, name in names.items():
        stored_of[name].append(stored)
    forms = _forms(stored_of)
    claims, left = _claims(forms, spell), {*forms}
    found: dict[str, dict[str, list[str]]] = {}
    while True:
        counts = {b: sum(len(forms[form]) for form in claimed & left) for b, claimed in claims.items()}
        best = max(counts, key=lambda b: (counts[b], _role(b) is None, -len(b)), default="")
        if not counts.get(best):
            return found
        tensors = defaultdict[str, list[str]](list)
        for name in (name for form in forms if form in claims[best] & left for name in forms[form]):
            if (spelled := spell(name.removeprefix(best))) is not None:
                tensors[spelled] += stored_of[name]
        found[best] = dict(tensors)
        left -= claims[best]


def _of_best_role(found: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the prefixes that a user may mean: those of weights if there are any, else of averages, else of states;
    without prefixes of tensors that lie beside one of these models.
    """
    roles = [None, "average", "optimizer"]
    best = min((roles.index(_role(beginning)) for beginning in found), default=0)
    alike = [beginning for beginning in found if roles.index(_role(beginning)) == best]
    models = [one for one in alike if not any(_is_beside(one, other, found) for other in alike)]
    return models or alike[:1]


def _is_beside(beginning: str, model: str, found: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether the tensors behind a prefix are further ones of a model, such as a head around it: they belong to no
    layer, and the model itself has none of them.
    """
    tensors = found[beginning]
    is_lone = model.startswith(beginning) and beginning != model and _role(beginning) == _role(model)
    return is_lone and not any(map(numbers_in, tensors)) and tensors.keys().isdisjoint(found[model])


def _forms(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their form without numbers; equal forms begin alike."""
    forms: dict[str, list[str]] = {}
    for name in names:
        forms.setdefault(without_numbers(name), []).append(name)
    return forms


def _claims(forms: Mapping[str, list[str]], spell: Spell) -> dict[str, set[str]]:
    """For each beginning of names the forms that are known behind it."""
    claims = defaultdict[str, set[str]](set)
    for form, (name, *_) in forms.items():
        for beginning in _beginnings(name):
            if spell(name.removeprefix(beginning)) is not None:
                claims[beginning].add(form)
    return claims


def _beginnings(name: str) -> Iterator[str]:
    """The beginnings of a name up to a dot, the empty one first, before any number."""
    yield ""
    segments = name.split(".")[:-1]
    for place, beginning in enumerate(accumulate(segments, "{0}.{1}".format)):
        if place == _DEEPEST or is_index(segments[place]):
            return
        yield f"{beginning}."


def _place(beginning: str) -> str:
    return f"below '{beginning}'" if beginning else "at the top"


def _role(beginning: str) -> str | None:
    """Return the role of the tensors behind a prefix: ``optimizer`` or ``average``; None for plain weights."""
    segments = beginning.split(".")
    if any(map(_OF_OPTIMIZER.fullmatch, segments)):
        return "optimizer"
    return "average" if any(map(_AVERAGE.fullmatch, segments)) else None


def spelled_alike(one: Model, other: Model) -> dict[str, str]:
    """The names of the second model's tensors, each as the first model calls it, where the two spell it differently."""
    ours, theirs = ([tensor.name for tensor in model.tensors] for model in (one, other))
    return respelled(ours, theirs, Spellings(one.architecture, one.config), Spellings(other.architecture, other.config))


def respelled(
    ours: Collection[str], theirs: Collection[str], spellings: Spellings, of_theirs: Spellings | None = None
) -> dict[str, str]:
    """Return our names of tensors by their names of the same tensors, where the two differ.

    Empty if two names of one side are of one tensor.
    """
    if {*ours} == {*theirs}:
        return {}
    names = {spellings.tensor(name): name for name in ours}
    others = {(of_theirs or spellings).tensor(name): name for name in theirs}
    if len(names) < len(ours) or len(others) < len(theirs):
        return {}
    return {name: names[tensor] for tensor, name in others.items() if names.get(tensor, name) != name}
