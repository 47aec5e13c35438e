"""A mistake in a config as one line: key, value, rule, nearest valid name."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel


def _known_keys(schema: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """The keys of the section that holds `location`, as dotted names."""
    model: Any = schema
    for part in location[:-1]:
        field = (
            model.model_fields.get(part)
            if isinstance(model, type) and issubclass(model, BaseModel)
            else None
        )
        model = field.annotation if field is not None else None
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    prefix = "".join(f"{part}." for part in location[:-1])
    return [prefix + name for name in model.model_fields]


def explain(schema: type[BaseModel], error: Any, source: str) -> str:
    """`error`: one of pydantic's; `source` begins the line."""
    location = tuple(error["loc"])
    key = ".".join(str(part) for part in location) or "config"
    if error["type"] == "extra_forbidden":
        # Misspelt, or right but in the wrong section: look in its own section, then everywhere.
        section = _known_keys(schema, location)
        everywhere = [
            k for name in schema.model_fields for k in (name, *_known_keys(schema, (name, "")))
        ]
        near = difflib.get_close_matches(key, section, 1, 0.6)
        near = near or [k for k in everywhere if k.split(".")[-1] == location[-1]] or section[:8]
        return f"{source}: {key}: unknown key; nearest: {', '.join(near)}"
    if error["type"] == "missing":
        return f"{source}: {key}: must be set"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{source}: {key}: {message}" if location else f"{source}: {message}"
    return f"{source}: {key}: {error['input']!r}: {message[0].lower()}{message[1:]}"
