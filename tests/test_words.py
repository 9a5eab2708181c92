"""English that is read once: how docstrings begin, and words that have one meaning (docs/reference/words.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_arrows import FILES, ROOT

DOCS = ROOT / "docs"
MODULES = [*FILES.values(), *sorted((ROOT / "tools").rglob("*.py"))]
QUESTION = re.compile(r"(What|How|Which|Where|When|Why|Whose|Of|As|That|Those)\b")
"""The beginning of a docstring that does not say what a thing is or does."""
MESSAGE = re.compile(r"\w*Error|refused|[uU]nfit")
"""The name of a call that makes a message."""
OF_CODE = re.compile(r"\b(atom|holder|piece|slab|arrangement)s?\b")
OF_THE_NOTATION = re.compile(r"\b(deals?|dealt)\b")
ARGUMENTS = re.compile(r"^``\w+``: ", re.MULTILINE)
"""A line of the docstring of a class of arguments."""
EXPLAINED = {"words.md", "architecture-files.md", "architectures.md", "models.md"}


def docstrings(file: Path) -> Iterator[tuple[str, bool]]:
    """Each text that stands alone, and whether that of which it stands may be a bool."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = node.body if isinstance(getattr(node, "body", None), list) else []
        for before, statement in zip([None, *body], body, strict=False):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                kind = getattr(before, "annotation", None) if before is not None else getattr(node, "returns", None)
                is_stated = before is None or isinstance(before, ast.AnnAssign)
                text = str(statement.value.value).strip()
                yield text, not is_stated or (kind is not None and ast.unparse(kind).endswith(("bool", "bool]")))


def messages(file: Path) -> Iterator[str]:
    for call in ast.walk(ast.parse(file.read_text())):
        name = getattr(call.func, "attr", getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
        if MESSAGE.fullmatch(name):
            for part in ast.walk(call):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_docstring_says_what_a_thing_is_or_does(file: Path) -> None:
    texts = [*docstrings(file)]
    questions = [text for text, _ in texts if QUESTION.match(text)]
    assert not questions, f"{len(questions)} begin as a question does, the first: {questions[0]}"
    predicates = [text for text, is_bool in texts if text.startswith("Whether") and not is_bool]
    assert not predicates, f"only of a bool it is said 'whether': {predicates[0]}"


@pytest.mark.parametrize("file", [*FILES.values()], ids=lambda file: str(file.relative_to(ROOT)))
def test_a_field_has_a_docstring_of_its_own(file: Path) -> None:
    """Not a paragraph over the class that lists them; ``help`` lists what a class of arguments says in lines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)) and not ARGUMENTS.search(text):
            fields = [ast.unparse(each.target) for each in node.body if isinstance(each, ast.AnnAssign)]
            listed = [name for name in fields if f"``{name}``" in text]
            assert len(listed) < 4, f"{node.name} lists {', '.join(listed)}"


@pytest.mark.parametrize("file", [*FILES.values()], ids=lambda file: str(file.relative_to(ROOT)))
def test_a_message_has_words_of_its_readers(file: Path) -> None:
    said = [text for text in messages(file) if OF_CODE.search(text) or OF_THE_NOTATION.search(text)]
    assert not said, said[0]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.name)
def test_a_page_explains_its_words(page: Path) -> None:
    """Words of the code stand where the code is explained, words of the notation with the notation."""
    text = page.read_text()
    assert page.name in {"words.md", "design.md"} or not OF_CODE.search(text)
    assert page.name in EXPLAINED or not OF_THE_NOTATION.search(text)


def test_the_words_are_few_and_used() -> None:
    words = re.findall(r"^\| (\w+) \|", (DOCS / "reference" / "words.md").read_text(), re.MULTILINE)[1:]
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md") if page.name != "words.md")
    code = "".join(file.read_text() for file in FILES.values())
    assert len(words) == len({*words}) <= 20
    assert not [word for word in words if word not in pages and word not in code]
