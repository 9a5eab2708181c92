"""The answer of ``reshard verify``: what was asked, what has been found so far, and the verdict that follows; in words,
for a terminal.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.formats.errors import IncompleteError, ReshardError, one_line
from reshard.formats.mesh import read_mesh
from reshard.text import Comparison, align, human_bytes, number, percent, plural, ratio
from reshard.verify.bytes.exact_report import Damage, ExactReport, FirstDifference
from reshard.verify.loader.ask import LoaderReport, UncheckedFormatError

if TYPE_CHECKING:  # they import torch
    from reshard.verify.engine.compare import EngineReport
    from reshard.verify.forward.job import Logits
    from reshard.verify.forward.report import ForwardReport, LayerRow

SHOWN = 10
"""Lines of each kind that the summary shows; ``--json`` has all of them."""


NOT_LISTED = "extra files were not looked for, as where the shards lie, files could not be listed"


@dataclass(frozen=True)
class OwnPlan:
    """The user's own plan that bytes were compared with, and where it differs from the built-in rules of the type.

    ``differences`` is None if there are no such rules.
    """

    name: str
    model_type: str
    differences: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.differences is None:
            return f"plan {self.name}: there are no built-in rules of model type '{self.model_type}' to compare it with"
        if not self.differences:
            return f"plan {self.name}: says the same as the built-in rules of model type '{self.model_type}'"
        title = f"plan {self.name}: differs from the built-in rules of model type '{self.model_type}'"
        return "\n".join([title, *_some("", self.differences)])


def power_in_words(forward: ForwardReport) -> str:
    """Return a sentence on the smallest fault that the run would have shown and, if that is poor, on how to see smaller
    ones.
    """
    power = forward.power
    assert power is not None
    text = (
        f"A fault that changes values by {percent(power.seen_from)} or more would have been seen anywhere "
        f"(the noise is largest at '{power.place}': {percent(power.noise)})."
    )
    if power.bias_ratio is not None and power.bias_ratio <= forward.factor:
        text += f" A bias added twice would not: it measures {ratio(power.bias_ratio)} at '{power.bias_place}'."
    if power.is_poor:
        text += " That is a weak test" + ("; --compute-dtype float32 sees more." if forward.dtype != "float32" else ".")
    return text


def _difference_in_words(exact: ExactReport) -> str:
    if exact.first is not None:
        first, places = exact.first, len(exact.damages)
        further = "" if places == 1 else f"; {places} parts of tensors differ"
        place = f"at {list(first.index)} on rank {first.rank}{_stored(first)}"
        return f"Bytes differ, first in tensor '{first.tensor}' {place}{further}."
    for word, items in (("missing: ", exact.missing), ("extra: ", exact.extra), ("", exact.problems)):
        if items:
            return f"The shards are not the original's: {word}{one_line(items[0])}{_further(items)}."
    return f"A config is not as it should be: {one_line(str(exact.configs[0]))}."


def _amount(report: ExactReport) -> str:
    size, tensors = human_bytes(report.nbytes), plural(report.tensors, "tensor")
    on = f" on {plural(report.ranks, 'rank')}" if report.ranks is not None else ""
    form = f", in the format {report.format}" if report.format else ""
    return f"{size} in {tensors}{on}, {report.mesh}{form}"


def exact_summary(report: ExactReport) -> str:
    """Return the findings of the byte comparison in words."""
    if report.verdict == "same":
        extra = (
            "nothing missing, nothing extra" if report.is_listed else f"nothing missing, no tensor extra; {NOT_LISTED}"
        )
        if report.not_compared:
            extra = f"no tensor missing, none extra; {not_compared(report.not_compared)}"
        return f"bytes: all equal, {_amount(report)}; {extra}"
    amount = f"{_amount(report)} compared" if report.tensors else "none was compared"
    lines = [f"bytes: different ({amount})"]
    lines += _some("", report.problems)
    lines += _some("missing: ", report.missing)
    lines += _some("extra: ", report.extra)
    lines += _some("", report.configs)
    lines += [] if report.is_listed else [f"  {NOT_LISTED}"]
    if report.first is not None:
        lines.append(f"  first: {one_line(str(report.first))}")
    damages = [
        f"{d.tensor} on rank {d.rank}{_stored(d)}: {plural(d.elements, 'different element')} "
        f"({plural(d.nbytes, 'byte')})"
        for d in report.damages
    ]
    return "\n".join(lines + _some("", damages))


def not_compared(names: Sequence[str]) -> str:
    """Return a clause on what was not compared: files, if there is no manifest to compare them by, or the manifest's
    content.
    """
    further = f" and {len(names) - 5} more" if len(names) > 5 else ""
    why = "" if any("reshard.json" in name for name in names) else ", as there is no reshard.json"
    return f"not compared{why}: {one_line(', '.join(names[:5]))}{further}"


def _stored(difference: FirstDifference | Damage) -> str:
    """The name of another program's tensor that has a part of the original's."""
    return f", in '{difference.stored}'" if difference.stored else ""


def forward_summary(report: ForwardReport) -> str:
    """Return the findings of the forward and backward pass: tables of places, and the logits beside the original's."""
    mesh = read_mesh(report.mesh, "mesh")
    why = f" ({report.reason})" if report.reason else ""
    lines = [
        f"forward: {report.dtype} on {plural(report.ranks, 'rank')} ({mesh}), {report.device}, {report.backend}{why}; "
        f"{report.batch} x {report.seq} tokens, seed {report.seed}; measured against {report.exact_dtype}"
    ]
    if report.repeated is not None:
        lines.append(f"The original's own run, done again, differs by {report.repeated:.2g} times the noise.")
    lines += _places("layer", report.layers)
    if report.cut:
        cut = f"'{report.cut[0]}'{_further(report.cut)}"
        lines.append(f"A rank's config.json gives {cut} another shape: other programs may not load it.")
    if report.gradients:
        worst = sorted(report.gradients, key=lambda row: (row.is_same, -row.ratio))[:SHOWN]
        lines += ["", *_places("gradient of", worst)]
        if len(report.gradients) > SHOWN:
            lines.append(f"and {len(report.gradients) - SHOWN} more weights with smaller ratios")
    return "\n".join([*lines, *(["", *_logits(report.logits)] if report.logits is not None else [])])


def _places(what: str, rows: Sequence[LayerRow]) -> list[str]:
    has_effects = any(row.effect is not None for row in rows)
    cells = [(what, "error", "noise", "ratio", *(["without it"] if has_effects else []), "")]
    for row in rows:
        worst = row.worst if what == "layer" else row.worst.replace("token", "row").replace("channel", "column")
        mark = "" if row.is_same else f"<- different, worst in {worst} on rank {row.rank}"
        effect = [ratio(row.effect)] if has_effects else []
        cells.append((row.name, number(row.error), number(row.noise), ratio(row.ratio), *effect, mark))
    return align(cells, right=(1, 2, 3, 4) if has_effects else (1, 2, 3), width=None)


def _logits(logits: Logits) -> list[str]:
    cells: list[tuple[str, ...]] = [("logits", "max error", "relative", "KL, nats", "same top token")]
    for name, prefix in (("shards", ""), ("original's own", "own_")):
        values = [getattr(logits, f"{prefix}{key}") for key in ("max_error", "relative_error", "kl", "agreement")]
        cells.append((name, *(number(x) for x in values[:3]), number(values[3], ".2%")))
    lines = align(cells, right=(1, 2, 3, 4), width=None)
    for m in logits.mismatches[:SHOWN]:
        lines.append(f"  position {m.position}: top token {m.found}, not {m.expected}, which led by {number(m.margin)}")
    remaining = len(logits.mismatches) - SHOWN
    return [*lines, *([f"  and {remaining} more positions"] if remaining > 0 else [])]


def _further(items: Sequence[Any]) -> str:
    """Return a note on the number of items after the first; "" if there is one."""
    return f" (and {len(items) - 1} more)" if len(items) > 1 else ""


def _some(title: str, items: Sequence[Any]) -> list[str]:
    lines = [f"  {title}{one_line(str(item))}" for item in items[:SHOWN]]
    return [*lines, f"  {title}and {len(items) - SHOWN} more"] if len(items) > SHOWN else lines


VERDICTS = {"same": 0, "different": 1, "unchecked": 2, "incomplete": 2, "without effect": 3}
"""The verdicts, with their exit codes."""


@dataclass(repr=False)
class Answer(Comparison):
    """A request and its findings so far. True only if the ``verdict`` is ``same``; ``raise_if_different()`` raises
    MismatchError. A report is None if that check was not done.
    """

    original: str
    shards: str
    options: dict[str, Any]
    plan: OwnPlan | None = None
    exact: ExactReport | None = None
    forward: ForwardReport | None = None
    engine: EngineReport | None = None
    loader: LoaderReport | None = None
    with_engine: bool = False
    """Whether an engine's run was asked for."""
    error: ReshardError | None = None
    """The reason why something could not be checked."""
    evidence: list[str] = field(default_factory=list)
    """The grounds of the verdict."""
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """The time of each step."""
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def wants_forward(self) -> bool:
        """Whether the forward pass was asked for, too."""
        return "exact_only" not in self.options

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different, 2 not all is there or could be checked, 3 an adapter that changes nothing."""
        return VERDICTS[self.verdict]

    @property
    def verdict(self) -> str:
        """The answer in one word."""
        bytes_differ = self.exact is not None and self.exact.verdict == "different"
        runs = [run for run in (self.forward, self.engine, self.loader) if run is not None]
        if bytes_differ or not all(run.is_same for run in runs):
            return "different"
        if self.error or self.exact is None:
            return "incomplete" if isinstance(self.error, IncompleteError) else "unchecked"
        has_no_effect = self.forward is not None and self.forward.effect is not None and not self.forward.effect.is_seen
        return "without effect" if has_no_effect else "same"

    def __bool__(self) -> bool:
        return self.verdict == "same"

    @property
    def in_words(self) -> str:
        """The verdict in a few sentences, with the first tensor and the first layer that differ by name."""
        exact, forward, plan, parts = self.exact, self.forward, self.plan, list[str]()
        if exact is not None and exact.verdict == "different":
            parts.append(_difference_in_words(exact))
        elif exact is not None:
            by = f" by the plan {plan.name}" if plan is not None else ""
            by = f" after a cast to {exact.cast}{by}" if exact.cast else by
            parts.append(f"Every byte is the original's{by} ({_amount(exact)}).")
            text = not_compared(exact.not_compared)
            parts += [f"{text[:1].upper()}{text[1:]}."] if exact.not_compared else []
            if plan is not None and plan.differences != () and forward is None:
                parts.append("Only the forward pass can tell if that plan is right.")
        parts += filter(None, [self.loader.verdict] if self.loader is not None else [])
        if forward is not None:
            parts.append(forward.verdict)
            parts += [power_in_words(forward)] if forward.is_same and forward.power is not None else []
        if self.engine is not None:
            parts.append(self.engine.verdict)
        if self.error is not None:
            is_of_engine = self.with_engine and (forward is not None or not self.wants_forward)
            subject = "The engine's run" if is_of_engine else "The forward pass"
            subject = "The format" if isinstance(self.error, UncheckedFormatError) else subject
            what = f"{subject if exact is not None else 'It'} could not be checked"
            what = "Not all files are there" if isinstance(self.error, IncompleteError) else what
            parts.append(f"{what}: {self.error.message}")
        if self.evidence and self.verdict != "different":
            parts.append(f"It rests on: {'; '.join(self.evidence)}.")
        return " ".join(parts) or "Nothing was checked."

    @property
    def headline(self) -> str:
        """The verdict, and why."""
        return f"{self.verdict.upper()}: {self.in_words}"

    def to_text(self, width: int | None = None, report: Path | None = None) -> str:
        """Return the text for a person, the verdict last; ``report`` is the page that was written, if one was."""
        parts = [str(self.plan)] if self.plan is not None else []
        parts += [exact_summary(self.exact)] if self.exact is not None else []
        parts += [str(self.loader)] if self.loader is not None else []
        parts += [*self.notes, *([forward_summary(self.forward)] if self.forward is not None else [])]
        parts += [str(self.engine)] if self.engine is not None else []
        parts += [f"report: {report}"] if report is not None else []
        return "\n".join([*parts, "", self.headline]) if parts else self.headline

    def to_document(self) -> dict[str, Any]:
        """The document of ``--json`` (without its version), from which the page is made too."""
        from reshard.version import __version__

        document = {
            "command": "verify",
            "original": self.original,
            "shards": self.shards,
            "verdict": self.verdict,
            "summary": self.in_words,
            "plan": asdict(self.plan) if self.plan is not None else None,
            "exact": {"verdict": self.exact.verdict, **asdict(self.exact)} if self.exact is not None else None,
            "forward": asdict(self.forward) if self.forward is not None else None,
            "engine": asdict(self.engine) if self.engine is not None else None,
            "loader": asdict(self.loader) if self.loader is not None else None,
            "error": {"message": self.error.message, "hint": self.error.hint} if self.error else None,
            "evidence": self.evidence,
            "notes": self.notes,
            "options": {key: value for key, value in self.options.items() if value not in (None, False)},
            "seconds": self.seconds,
            "environment": {
                "reshard": __version__,
                "python": platform.python_version(),
                "platform": platform.platform(terse=True),
            },
            "created": self.created,
        }
        cleaned: dict[str, Any] = _as_json(document)
        return cleaned


def _as_json(value: Any) -> Any:
    """The same with what JSON has: ``"inf"``, ``"-inf"`` and ``"nan"`` for numbers, hex digits for bytes."""
    if isinstance(value, dict):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
