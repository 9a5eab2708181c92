"""The answer of ``reshard verify``: what was asked, what has been found so far, and the verdict that follows."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from formats.errors import ReshardError
from reshard.text import Result
from verify.report.words import OwnPlan, exact_summary, forward_summary, in_words

VERDICTS = ("same", "different", "unchecked", "without effect")
"""In the order of the exit codes 0 to 3."""


@dataclass(repr=False)
class Answer(Result):
    """What was asked for, and what has been found so far.

    ``exact`` is the report of the bytes, ``forward`` that of the forward pass and ``engine`` that of an engine's own
    run (asked for with ``engine_options``); each is None if it was not done. ``seconds`` has the time of each part.
    """

    original: str
    shards: str
    options: dict[str, Any]
    plan: OwnPlan | None = None
    exact: Any = None
    forward: Any = None
    engine: Any = None
    engine_options: dict[str, Any] | None = None
    error: ReshardError | None = None
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def wants_forward(self) -> bool:
        """Whether more than the bytes was asked for."""
        return "exact_only" not in self.options

    @property
    def exit_code(self) -> int:
        """0 the same, 1 different, 2 could not be checked, 3 an adapter that changes nothing."""
        return VERDICTS.index(self.verdict)

    @property
    def verdict(self) -> str:
        """The answer in one word."""
        bytes_differ = self.exact is not None and self.exact.verdict == "different"
        runs = [run for run in (self.forward, self.engine) if run is not None]
        if bytes_differ or not all(run.is_same for run in runs):
            return "different"
        if self.error or self.exact is None:
            return "unchecked"
        has_no_effect = self.forward is not None and self.forward.effect is not None and not self.forward.effect.is_seen
        return "without effect" if has_no_effect else "same"

    @property
    def in_words(self) -> str:
        """The verdict in a sentence or two."""
        is_of_engine = self.engine_options is not None and (self.forward is not None or not self.wants_forward)
        of = "The engine's run" if is_of_engine else "The forward"
        return in_words(self.exact, self.forward, self.error, self.plan, self.engine, of)

    @property
    def headline(self) -> str:
        """The verdict, and why."""
        return f"{self.verdict.upper()}: {self.in_words}"

    def to_text(self, width: int | None = None, report: Path | None = None) -> str:
        """What is printed for a person, the verdict last; ``report`` is the page that was written, if one was."""
        parts = [str(self.plan)] if self.plan is not None else []
        parts += [exact_summary(self.exact)] if self.exact is not None else []
        parts += [*self.notes, *([forward_summary(self.forward)] if self.forward is not None else [])]
        parts += [str(self.engine)] if self.engine is not None else []
        parts += [f"report: {report}"] if report is not None else []
        if not parts:  # the error has been printed
            return self.verdict.upper()
        return "\n".join([*parts, "", self.headline])

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
            "exact": self.exact.to_document() if self.exact is not None else None,
            "forward": asdict(self.forward) if self.forward is not None else None,
            "engine": asdict(self.engine) if self.engine is not None else None,
            "error": {"message": self.error.message, "hint": self.error.hint} if self.error else None,
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
        cleaned: dict[str, Any] = _finite(document)
        return cleaned


def _finite(value: Any) -> Any:
    """The same without the numbers that JSON does not have: they become ``"inf"``, ``"-inf"`` and ``"nan"``."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
