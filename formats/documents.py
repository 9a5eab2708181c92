"""Documents from outside (config, index, manifest, shard metadata), checked at once against their description.

A description is a *reader*: a function that takes a value and its place in the document, and gives back what the code
goes on with, or raises ``Unfit`` that names the place. Readers are put together: ``mapping(text)``, ``optional(size)``,
and a function with a ``Record`` for an object whose fields differ. What has been read needs no second look.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, lru_cache, partial
from pathlib import PurePosixPath
from types import NoneType
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from reshard.formats.errors import CheckpointError, NotationError, brief
from reshard.formats.store import FilePath, read_file

T = TypeVar("T")
Reader = Callable[[object, str], T]

LARGEST = 2**63 - 1
"""The largest size, count or offset that a file format and the operating system can express."""
LARGEST_FLOAT32 = 3.4028234663852886e38
LONGEST_NUMBER = 1024
"""Bits of an integer that is no size; as large as a float."""
DEEPEST = 100
"""Objects and lists within each other. transformers' own configs have 6."""
MAX_CONFIG = 64 << 20
"""Bytes of a ``config.json``; those with the names of 20,000 classes have 2 MB."""
MAX_INDEX = MAX_MANIFEST = 256 << 20
"""Bytes of an index of tensors (that of 100,000 tensors has 10 MB), and of a manifest, which holds that index and the
headers of all source files.
"""


class Unfit(ValueError):  # noqa: N818  # it never leaves as it is
    """A wrong value in a document. One line: the field, the expected value, and the value that is there."""


# -------------------------------------------------------------------------------------------------------- documents


def lenient_json(text: str, **options: Any) -> Any:
    """Parse JSON as Python's parser does. Raises ``ValueError`` with the reason."""
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def strict_json(text: str) -> Any:
    """Parse JSON, refusing what Python's parser forgives: repeated keys, ``NaN`` and ``Infinity``.

    Raises ``ValueError`` with the reason.
    """
    return lenient_json(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)


def read_document(
    path: FilePath, limit: int, reader: Reader[T], *, hint: str | None = None, parse: Callable[[str], Any] = strict_json
) -> tuple[bytes, T]:
    """Read a JSON file: its document, and the result of ``reader`` for it. Raises CheckpointError that names
    the file.
    """
    raw = read_file(path, limit)
    try:
        return raw, reader(sound(parse(raw.decode("utf-8-sig"))), "")
    except Unfit as error:
        raise CheckpointError(f"{path}: {error}", hint) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}", hint or "fetch or copy the file again") from None


def read_config(path: FilePath) -> dict[str, Any]:
    """A ``config.json``: a JSON object as Python's own reader takes it, and transformers. Raises CheckpointError."""
    return read_document(path, MAX_CONFIG, json_object, parse=lenient_json)[1]


def json_bytes(document: Any, *, indent: int | None = 2) -> bytes:
    """A document as JSON in UTF-8. Half a surrogate pair (also: a byte of a file name that is no UTF-8) is escaped."""
    return json.dumps(document, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


def sound(document: T) -> T:
    """Return the same document, unless it is nested too deeply, or has a number of too many digits.

    Raises ``ValueError``.
    """
    level: list[object] = [document]
    for _ in range(DEEPEST):
        below: list[object] = []
        for value in level:
            for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,):
                if isinstance(item, int) and item.bit_length() > LONGEST_NUMBER:
                    raise Unfit(f"holds a number of about {item.bit_length() * 3 // 10:,} digits")
                if isinstance(item, (dict, list)):
                    below.append(item)
        if not below:
            return document
        level = below
    raise Unfit(f"is nested more than {DEEPEST} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} appears twice")
    return content


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


# ---------------------------------------------------------------------------------------------------------- readers


def unfit(where: str, what: str, value: object) -> Unfit:
    """``ranks[3].rank should be a number of a rank and is "x"``."""
    return Unfit(f"{where} should be {what} and is {brief(value)}".lstrip())


def anything(value: object, where: str) -> Any:
    """Whatever it is."""
    return value


def text(value: object, where: str) -> str:
    """A string."""
    if not isinstance(value, str):
        raise unfit(where, "a text", value)
    return value


def utf8(value: object, where: str) -> bytes:
    """A string, as bytes."""
    try:
        return text(value, where).encode()
    except UnicodeEncodeError:
        raise unfit(where, "valid Unicode", value) from None


def whole(low: int, high: int = LARGEST) -> Reader[int]:
    """An integer from ``low`` to ``high``."""
    bounds = f"a whole number from {low}" + (f" to {high}" if high < LARGEST else " on")

    def read(value: object, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise unfit(where, bounds, value)
        return value

    return read


def number(value: object, where: str) -> float:
    """A number that is finite in float32."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= LARGEST_FLOAT32:
        raise unfit(where, "a number that float32 can hold", value)
    return float(value)


size = whole(0)
"""A size, a count, an offset."""


def truth(value: object, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise unfit(where, "true or false", value)
    return value


def json_object(value: object, where: str) -> dict[str, Any]:
    """An object, whatever is in it."""
    if not isinstance(value, dict):
        raise unfit(where, "a JSON object", value)
    return value


def optional(reader: Reader[T]) -> Reader[T | None]:
    """Return a reader of null, or of anything that ``reader`` reads."""
    return lambda value, where: None if value is None else reader(value, where)


def items(reader: Reader[T], count: int | None = None) -> Reader[tuple[T, ...]]:
    """A list, of ``count`` items if that is given."""

    def read(value: object, where: str) -> tuple[T, ...]:
        if not isinstance(value, list) or (count is not None and len(value) != count):
            raise unfit(where, "a list" if count is None else f"a list of {count}", value)
        return tuple(reader(item, f"{where}[{place}]") for place, item in enumerate(value))

    return read


def mapping(reader: Reader[T]) -> Reader[dict[str, T]]:
    """An object whose values are alike."""
    return lambda value, where: {
        key: reader(item, f"{where}.{key}" if where else key) for key, item in json_object(value, where).items()
    }


def file_name(value: object, where: str) -> str:
    """A relative name with ``/`` that stays in its folder."""
    name = text(value, where)
    if not is_inside(name):
        raise Unfit(f"{where}: the file name {brief(name)} points outside the folder")
    return name


LONGEST_NAME = 255
"""Bytes of a file's name, on the file systems that are in use: a longer one is an error of the operating system's."""


@lru_cache(maxsize=4096)  # many chunks are in few files
def is_inside(name: str) -> bool:
    """Whether a relative name stays inside its folder, and its parts can be names of files."""
    path = PurePosixPath(name)
    can_be = all(len(part.encode("utf-8", "surrogatepass")) <= LONGEST_NAME for part in path.parts) and "\0" not in name
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and can_be


def notation(parse: Callable[[str], T], what: str = "a text", kinds: tuple[type, ...] = (str,)) -> Reader[T]:
    """Return a reader that gives a string, or a number as a string, to ``parse``. Its NotationError names the place."""

    def read(value: object, where: str) -> T:
        if not isinstance(value, kinds):
            raise unfit(where, what, value)
        try:
            return parse(str(value))
        except NotationError as error:
            raise NotationError(f"{where}: {error.message}", error.hint) from None

    return read


class Record:
    """An object whose fields are read one by one."""

    def __init__(self, value: object, where: str) -> None:
        self._fields: Mapping[str, object] = json_object(value, where)
        self._where = where
        self._asked = set[str]()

    def get(self, key: str, reader: Reader[T], default: Any = MISSING) -> T:
        """A field; without a ``default`` it must be there."""
        self._asked.add(key)
        if key in self._fields:
            return reader(self._fields[key], f"{self._where}.{key}" if self._where else key)
        if default is MISSING:
            raise Unfit(f"{self._where} has no {key!r}".lstrip())
        value: T = default
        return value

    def refuse_others(self) -> None:
        """Raise Unfit for a field that nobody asked for."""
        unknown = self._fields.keys() - self._asked
        if unknown:
            place = f"{self._where}: " if self._where else ""
            raise Unfit(f"{place}unknown key '{min(unknown)}' (known: {', '.join(sorted(self._asked))})")

    def others(self, reader: Reader[T]) -> T:
        """The fields that nobody has asked for yet."""
        fields = {key: value for key, value in self._fields.items() if key not in self._asked}
        self._asked |= fields.keys()
        return reader(fields, self._where)


def record(read_fields: Callable[[Record], T]) -> Reader[T]:
    """An object that ``read_fields`` reads field by field, and that has no others."""

    def reader(value: object, where: str) -> T:
        fields = Record(value, where)
        value_read = read_fields(fields)
        fields.refuse_others()
        return value_read

    return reader


# --------------------------------------------------------------------------------------------- dataclasses, by type

READERS: dict[Any, Reader[Any]] = {
    Any: anything, str: text, bool: truth, int: size, float: number, int | float: anything
}  # fmt: skip
"""The readers of values, by their types. Whoever has other types of values adds theirs."""
WRITERS: dict[Any, Callable[[Any], object]] = {}
"""For each type that is read from a text: the function that turns a value back into what a document holds."""


def structure(kind: Callable[..., T], table: Record, **values: object) -> T:
    """A dataclass from a table: each field that is not given by its type, or as its ``metadata`` say under ``read``.

    Under ``key`` they say what it is called there; None: it is not in the table. A dataclass that is ``flat`` has its
    fields in the same table, and a last field that is for ``others`` what no field before it is for.
    """
    for field, type_of, default in _fields_of(kind):
        if "flat" in field.metadata:
            values[field.name] = structure(type_of, table)
        elif "others" in field.metadata:
            values[field.name] = table.others(reader_for(type_of))
        elif field.name not in values:
            key, reader = field.metadata.get("key", field.name), field.metadata.get("read") or reader_for(type_of)
            values[field.name] = table.get(key, reader, default)
    return kind(**values)


def reader_of(kind: Callable[..., T]) -> Reader[T]:
    """The reader of a dataclass from a table of its fields, and no others."""
    return record(partial(structure, kind))


def document_of(value: Any) -> Any:
    """Return the JSON document from which ``structure`` makes this value, without fields that have their default."""
    if isinstance(value, (tuple, list, frozenset)):
        return [document_of(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]
    if isinstance(value, Mapping):
        return {key: document_of(item) for key, item in value.items()}
    kind: Any = type(value)
    if kind in WRITERS or not is_dataclass(value):
        return WRITERS[kind](value) if kind in WRITERS else value
    document: dict[str, Any] = {}
    for field, _, default in _fields_of(kind):
        if (content := getattr(value, field.name)) != default or default is MISSING:
            written = field.metadata.get("write", document_of)(content)
            document |= written if "others" in field.metadata else {field.metadata.get("key", field.name): written}
    return document


@cache
def _fields_of(kind: Any) -> list[tuple[Field[Any], Any, object]]:
    """The fields of a dataclass, with type and default (MISSING: it must be there)."""
    types = get_type_hints(kind)
    return [
        (field, types[field.name], field.default if field.default_factory is MISSING else field.default_factory())
        for field in fields(kind)
        if field.init and field.metadata.get("key", "") is not None
    ]


@cache
def reader_for(kind: Any) -> Reader[Any]:
    """The reader of a value of this type. A tuple of one need not stand in a list, unless that is a table."""
    if kind in READERS:
        return READERS[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return reader_of(kind)
    first, *rest_kinds = get_args(kind)
    if NoneType in rest_kinds:
        return optional(reader_for(Union[*(option for option in (first, *rest_kinds) if option is not NoneType)]))
    if get_origin(kind) is tuple:
        read_one, read_items = reader_for(first), items(reader_for(first))
        if is_dataclass(first) and first not in READERS:
            return read_items
        return lambda value, where: read_items(value, where) if isinstance(value, list) else (read_one(value, where),)
    if get_origin(kind) is frozenset:
        return lambda value, where: frozenset(items(reader_for(first))(value, where))
    return mapping(reader_for(rest_kinds[0]))
