"""null in a request: clients send it for what they leave to us, so it means what leaving out means."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Struct

Kind = TypeVar("Kind")

if TYPE_CHECKING:
    OrDefault = Annotated[Kind, "or null, for the default"]
else:

    class OrDefault:
        """`OrDefault[kind]`: null is read too, and the field then has its default."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return kind | None


class Request(Struct):
    """Base of what clients send, and of what stands in it, if any of it has another default than null.

    What a body may hold by the million has none: this costs a call for each.
    """

    def __post_init__(self) -> None:
        for name, factory in _defaults(type(self)):
            if getattr(self, name) is None:
                setattr(self, name, factory())


@cache
def _defaults(kind: type[Struct]) -> list[tuple[str, Any]]:
    """The optional fields whose default is not null, each with what makes it."""
    found = []
    for field in msgspec.structs.fields(kind):
        if field.default_factory is not msgspec.NODEFAULT:
            found.append((field.name, field.default_factory))
        elif field.default is not msgspec.NODEFAULT and field.default is not None:
            found.append((field.name, lambda default=field.default: default))
    return found
