"""The one kind of error that reaches a user: what is wrong, where, and what to do about it."""

from __future__ import annotations


class ReshardError(Exception):
    """A request that cannot be carried out, in words for the person who made it.

    ``message`` is one line: what is wrong, in which file, tensor or axis, what was expected and what was found.
    ``hint`` is one line: what to do about it.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class NotationError(ReshardError):
    """An expression of the notation, or of the sizes, that cannot be read or evaluated."""


class CheckpointError(ReshardError):
    """Files on disk that are not the checkpoint they claim to be."""


class PlanError(ReshardError):
    """A plan that does not fit the checkpoint, or a degree that the model's axes do not allow."""


class MismatchError(ReshardError):
    """Things that should be equal are not: a checksum, replicas, shards of different runs."""
