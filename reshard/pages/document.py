"""One HTML page that needs nothing else, written whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from reshard.pages.markup import Html, element, joined, void


def html_page(title: str, style: str, body: Html) -> str:
    """The text of a page. ``style`` comes behind the rules that all pages share; nothing else may be loaded or run."""
    style = (Path(__file__).parent / "base.css").read_text(encoding="utf-8") + style
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        void("meta", charset="utf-8"),
        void("meta", http_equiv="Content-Security-Policy", content=policy),
        void("meta", name="viewport", content="width=device-width, initial-scale=1"),
        void("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """A list of names with what there is to say of each."""
    return element("dl", *(joined(element("dt", name), element("dd", value)) for name, value in pairs))


def write_page(path: Path, text: str) -> None:
    """Write a page, whole or not at all; a file that exists is replaced. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
