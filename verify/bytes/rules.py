"""Compares a user's own plan file with the built-in rules of the model type.

The bytes of shards are compared with a plan. A plan that a user wrote may itself be wrong. Two checks need no run of
the model: how the plan differs from the built-in rules, and whether a rank's config.json differs from the original's
only in the rank's sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from reshard.formats.errors import ReshardError
from reshard.formats.files.checkpoint import CONFIG
from reshard.formats.notation.architecture import Architecture, one_or_all
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.expressions import Expression
from reshard.mesh.plan import Plan, make_plan, rank_config
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.source.source import UNSPLIT
from reshard.verify.bytes.exact_report import config_differences


def own_rules(plan: Plan, modules: Architecture | None) -> tuple[str, ...] | None:
    """The differences of a plan from the built-in rules of its model type, one line each.

    None if the type has no built-in rules. Rules that are written differently but have the same result do not count.
    The ``[modules]`` table is taken from the architecture ``modules``, if one is given.
    """
    model = plan.model
    built_in = _built_in(model)
    if built_in is None:
        return None
    lines = [*_modules(modules, built_in)] if modules is not None else []
    try:
        theirs = _planned(built_in, plan)
    except ReshardError as error:
        return (f"the built-in rules of '{built_in.name}' do not fit: {error.message}", *lines)
    return (*_tensors(plan, theirs), *_configs(plan, theirs), *lines)


def with_sound_config(plan: Plan) -> Plan:
    """The plan with only those lines under [config] that replace a size by a rank's own.

    The built-in line of the model type is taken if its axes have the same sizes in the plan. Another line of the plan
    is kept if it names an axis and gives the original's number (if there is one) for the whole model.
    """
    lines = plan.model.architecture.config
    built_in = _built_in(plan.model)
    with suppress(ReshardError):  # rules that do not fit give another config.json
        if built_in and (lines == built_in.config or not any(_configs(plan, _planned(built_in, plan)))):
            return plan
    chosen = {key: line for key, line in lines.items() if _is_sound(plan, key, line)}
    return _with_config(plan, chosen | (_evaluable(plan, built_in) if built_in is not None else {}))


def _built_in(model: Model) -> Architecture | None:
    try:
        return find_architecture(model.config, Path())
    except ReshardError:
        return None


def _bound(architecture: Architecture, model: Model) -> Model:
    """The same tensors, bound to other rules."""
    return bind(architecture, model.config, [FullTensor(t.name, t.dtype, t.shape, "plan") for t in model.tensors])


def _planned(architecture: Architecture, plan: Plan) -> Plan:
    """The same tensors on the same mesh, planned by other rules."""
    return make_plan(_bound(architecture, plan.model), plan.mesh, padding=plan.padding)


# ------------------------------------------------------------------------------------------------------- differences


def _tensors(plan: Plan, theirs: Plan) -> Iterator[str]:
    reported: set[str] = set()
    alike: dict[tuple[int, int], bool] = {}
    for name, kind, _ in plan.model.tensors:
        ours, built_in = plan.laid[kind], theirs.layouts[name]
        pair = id(ours), id(built_in)
        if pair not in alike:  # each rank's part, and the input dimensions
            alike[pair] = ours.boxes == built_in.boxes and ours.rule.input_dims == built_in.rule.input_dims
        if not alike[pair] and kind.template not in reported:
            reported.add(kind.template)
            if ours.rule == built_in.rule:
                yield f"{kind.template} is on other pipeline stages than by the built-in rules"
            else:
                yield f"{kind.template} is '{ours.rule}', built in '{built_in.rule}'"


def _configs(plan: Plan, theirs: Plan) -> Iterator[str]:
    reported: set[str] = set()
    for rank in range(plan.mesh.size):
        for difference in config_differences(CONFIG, rank_config(theirs, rank), rank_config(plan, rank)):
            if difference.key not in reported:
                reported.add(difference.key)
                has, should = (text or "nothing" for text in (difference.found, difference.expected))
                yield f"[config] {difference.key} is {has} on rank {rank}, built in {should}"


def _modules(ours: Architecture, built_in: Architecture) -> Iterator[str]:
    for name in sorted(ours.modules.keys() | built_in.modules.keys()):
        if ours.modules.get(name) != built_in.modules.get(name):
            rules_of = (side.modules.get(name) for side in (ours, built_in))
            has, should = (json.dumps(one_or_all(rules)) if rules else "nothing" for rules in rules_of)
            yield f"[modules] {name} is {has}, built in {should}"


# ---------------------------------------------------------------------------------------------------- a rank's config


def _with_config(plan: Plan, config: Mapping[str, Expression]) -> Plan:
    return replace(plan, model=replace(plan.model, architecture=replace(plan.model.architecture, config=config)))


def _is_sound(plan: Plan, key: str, line: Expression) -> bool:
    """Whether a line names an axis, and gives the original's number (if it has one) for the unsplit model."""
    if not line.names & plan.model.architecture.sizes.keys():
        return False
    whole = Plan(plan.model, UNSPLIT, {}, {})
    config = rank_config(_with_config(whole, {key: line}), 0)
    differences = config_differences(CONFIG, plan.model.config, config)
    return all(each.expected in (None, "null") or each.found is None for each in differences)


def _evaluable(plan: Plan, built_in: Architecture) -> dict[str, Expression]:
    """The built-in lines whose axes have the same sizes in the plan."""
    try:
        theirs = _bound(built_in, plan.model).sizes
    except ReshardError:
        return {}
    ours = plan.model.sizes
    places = [{}, *({"layer": layer} for layer in range(ours.counts.get("layer", 0)))]
    axes = built_in.sizes.keys()

    def has(line: Expression) -> bool:
        return all(ours.of(at).get(axis) == theirs.of(at).get(axis) for at in places for axis in line.names & axes)

    return {key: line for key, line in built_in.config.items() if has(line)}
