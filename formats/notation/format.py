"""A program's format: names, files and rules. ``format_file.py`` reads it from ``formats/programs/``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from formats.mesh import Mesh
from formats.notation.format_rules import (
    Constant,
    Demand,
    Dropped,
    Further,
    Line,
    Refusal,
    Renaming,
    Settings,
    Stack,
    Use,
)
from formats.notation.patterns import Pattern

_OfTypes = TypeVar("_OfTypes", "Line", "Constant", "Dropped")


@dataclass(frozen=True, eq=False)
class Format:
    """A program's format.

    ``load`` is the command that loads a folder ``{out}``, with the degrees that it was written for: ``{ranks}`` of a
    stage, ``{tp}``, ``{pp}``, ``{ep}`` and ``{etp}`` (of tp, for experts). It goes on with ``load_pp`` where there are
    several pipeline stages, with ``load_ep`` where there are several ranks of experts. ``files`` is the name of a
    rank's weight file, ``files_pp`` that of a rank of several pipeline stages, ``files_ep`` of several ranks of
    experts, ``files_pp_ep`` of both. They lie in ``folder``, which the file ``tracker`` names. ``inside`` is the entry
    of a file that has the tensors, ``entries`` are what else stands there. Where ``files`` cannot name several, a
    larger rank has files named as ``parts`` says, with an ``index``. With ``keep``, what no line covers keeps its name.
    The vocabulary is padded to a multiple of ``pad_to`` (0: it is not padded at all) and of the degree or, with
    ``pad_times_degree``, of their product where ``pad_to`` alone does not do, with ``pad_product`` of their product in
    any case. With ``free_padding``, what the program itself wrote may be padded to any size, and its padding may hold
    anything. ``numbered`` has the indices that each rank counts from 0. With ``same_ranks``, experts are dealt whole
    over the ranks of ``tp``. ``engine`` is the engine that ``reshard verify --engine`` runs, and ``load_format`` what
    it calls the format. ``model_types`` are those for which the format is known to be right; empty: the names of its
    lines decide. With ``boxes``, each file says where its pieces begin (see ``formats.files.boxes``), and nothing is
    padded. ``refused`` has the model types of which a format cannot say what the program has, and why; ``classes`` are
    known by their class. ``described`` are those for which the format's own lines, names, constants and the rest do not
    hold, but the ones of a file that the program wrote. ``compared`` has, where it is known, the
    types whose tensors were compared, and the classes that run in the same modules of the program. Of those that are
    ``described``, ``seen`` has the names of all tensors that were compared, and ``meshes`` the largest degree of each
    dimension of a mesh that was (None: any degree of it follows from the model's rules). A number that ``vectors``
    matches is stored as a vector of one.
    """

    name: str
    loaded_by: str
    load: str
    files: str
    lines: tuple[Line, ...]
    names: tuple[Renaming, ...]
    constants: tuple[Constant, ...]
    dropped: tuple[Dropped, ...]
    keep: bool
    pad_to: int
    same_ranks: bool
    model_types: tuple[str, ...] = ()
    load_pp: str = ""
    load_ep: str = ""
    files_pp: str | None = None
    files_ep: str | None = None
    files_pp_ep: str | None = None
    folder: str | None = None
    tracker: str | None = None
    inside: str | None = None
    entries: Mapping[str, int | float] = field(default_factory=dict)
    engine: str | None = None
    load_format: str | None = None
    parts: str | None = None
    index: str | None = None
    pad_times_degree: bool = False
    pad_product: bool = False
    free_padding: bool = False
    numbered: tuple[str, ...] = ()
    demands: tuple[Demand, ...] = ()
    settings: Settings | None = None
    refusals: tuple[Refusal, ...] = ()
    vectors: tuple[Pattern, ...] = ()
    ignored: tuple[Pattern, ...] = ()
    """Tensors of no use that older files have."""
    boxes: bool = False
    stacks: tuple[Stack, ...] = ()
    further: tuple[Further, ...] = ()
    """What is called otherwise behind the model's last layer; of several, the first that covers a name."""
    saved: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Files that torch.save writes, with what is in each."""
    documents: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """JSON files, with what is in each."""
    extra_state: tuple[Pattern, ...] = ()
    """Weights whose modules ask for a state of their own beside them: an empty one is written."""
    classes: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    compared: frozenset[str] = frozenset()
    meshes: Mapping[str, Mapping[str, int | None]] = field(default_factory=dict)
    seen: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _uses: dict[str, tuple[Use, ...]] = field(default_factory=dict, repr=False)
    _of: dict[str, Format] = field(default_factory=dict, repr=False)

    @property
    def described(self) -> frozenset[str]:
        """The types with lines of their own."""
        return frozenset(self.meshes)

    @property
    def has_parts(self) -> bool:
        """Whether a rank may have several files."""
        return self.parts is not None or "{part" in self.files or "{number" in self.files

    def file_name(self, mesh: Mesh, rank: int, part: int, parts: int = 1) -> str:
        """The name of a rank's weight file, one of ``parts``; ``shard`` and ``number`` count ranks and parts from 1."""
        of_a_stage = mesh.size // mesh.pp
        words = {"rank": rank, "ranks": mesh.size, "part": part, "pp": mesh.stage(rank % mesh.size)}
        words |= {"tp": rank % of_a_stage, "shard": rank + 1, "number": part + 1, "parts": parts}
        words |= {f"{name}_rank": place for name, place in mesh.coordinates(rank % mesh.size).items()}
        words |= {name: 0 for name in ("tp_rank", "pp_rank", "ep_rank") if name not in words}
        name = self.files_of(mesh.pp > 1, dict(mesh.degrees).get("ep", 1) > 1)
        name = (self.parts if parts > 1 and self.parts is not None else name).format_map(words)
        return f"{self.folder}/{name}" if self.folder else name

    def load_command(self, out: object, mesh: Mesh) -> str:
        """The command that loads a folder of this format, with the degrees of its mesh."""
        degrees = {name: dict(mesh.degrees).get(name, 1) for name in ("tp", "ep", "pp")}
        more = (self.load_pp if degrees["pp"] > 1 else "") + (self.load_ep if degrees["ep"] > 1 else "")
        degrees["etp"] = 1 if mesh.same_ranks else degrees["tp"]
        return (self.load + more).format_map({"out": out, "ranks": mesh.size // mesh.pp, **degrees})

    @property
    def is_distributed(self) -> bool:
        """Whether its files are those of a distributed checkpoint of torch's (see ``formats.files.dcp``)."""
        return self.files.endswith(".distcp")

    def ignores(self, name: str) -> bool:
        """Whether a tensor of this name is of no use."""
        return any(pattern.match(name) is not None for pattern in self.ignored)

    def files_of(self, pp: bool, ep: bool) -> str:
        """How weight files are named where there are several stages, and several ranks of experts."""
        both = self.files_pp_ep if pp and ep else None
        return both or (self.files_pp if pp else None) or (self.files_ep if ep else None) or self.files

    def of(self, config: Mapping[str, Any]) -> Format:
        """The format with the lines for a model of this config alone."""
        kind = self.type_of(config)
        if kind not in self._of:
            own = self
            if kind in self.meshes:
                own = replace(self, names=(), refusals=(), vectors=())
            self._of[kind] = replace(
                own,
                lines=tuple(self._for(kind, self.lines)),
                constants=tuple(self._for(kind, self.constants)),
                dropped=tuple(self._for(kind, self.dropped)),
                _uses={},
                _of={},
            )
        return self._of[kind]

    def _for(self, kind: str, entries: Iterable[_OfTypes]) -> Iterator[_OfTypes]:
        """The entries that hold for a model type: of one that is ``described``, its own alone."""
        for entry in entries:
            if kind in entry.types if entry.types is not None else kind not in self.meshes:
                yield entry

    def type_of(self, config: Mapping[str, Any]) -> str:
        """What ``types`` call a model of this config: the class, if it is one of ``classes``, or else its type."""
        first = self.class_of(config)
        return first if first in self.classes else str(config.get("model_type"))

    @staticmethod
    def class_of(config: Mapping[str, Any]) -> str:
        """The class of a model of this config, as ``config.json`` says it; empty: it does not."""
        classes = config.get("architectures")
        return str(classes[0]) if isinstance(classes, list) and classes else ""

    def uses(self, name: str) -> Sequence[Use]:
        """The lines that cover a tensor's name, in their order."""
        if name not in self._uses:
            self._uses[name] = tuple(self._find(name))
        return self._uses[name]

    def _find(self, name: str) -> Iterator[Use]:
        for line in self.lines:
            for number, source in enumerate(line.sources):
                found = source.match(name)
                if found is not None:
                    (stacked,) = source.indices - line.target.indices or {None}
                    yield Use(line, number, line.target.fill(found), found[stacked] if stacked else None)
