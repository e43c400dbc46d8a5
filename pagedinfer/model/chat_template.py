"""Chat templates: Jinja that comes with the model, rendered in a sandbox and within bounds.

The settings and functions are those that transformers documents for templates. A template is a program of a
stranger. The sandbox keeps it from Python and its files; the bounds keep it from running for ever: loops and
macros have a number of turns, and texts and numbers a size to which operators, calls and filters may make them
grow. What is left is that one call of a string method may take some seconds.
"""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagedinfer.errors import ModelError, RequestError

__all__ = ["render_chat"]

_MAX_TURNS = 1_000_000  # of all loops and macros of one rendering: about a second
_MAX_SIZE = 1 << 22  # characters, entries, or bits of a number
_GROWS = frozenset({"+", "*", "**", "%"})


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  # Jinja wants a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox, with an account of the turns that are left."""

    intercepted_binops = _GROWS

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.turns_left = _MAX_TURNS
        self.globals = {
            "range": self.globals["range"],
            "namespace": _namespace,
            "dict": lambda *args, **fields: dict(*args, **fields),
            "cycler": self.globals["cycler"],
            "joiner": self.globals["joiner"],
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        self.filters = {name: _bounded(made) for name, made in self.filters.items()} | {"tojson": _tojson}

    def turn(self) -> None:
        """Count one turn of a loop or one call of a macro."""
        self.turns_left -= 1
        if self.turns_left < 0:
            raise jinja2.TemplateError(f"it takes more than {_MAX_TURNS} turns of its loops")

    def call(self, context: Any, obj: Any, /, *args: Any, **fields: Any) -> Any:
        _check_arguments(args, fields)
        return _check_size(super().call(context, obj, *args, **fields))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = _size(left), _size(right)
        if operator == "*" and isinstance(left, int) and isinstance(right, int):
            size = sum(sizes)
        elif operator == "**" or operator == "*":
            many = right if isinstance(right, (int, float)) else left
            size = max(sizes) * abs(many) if isinstance(many, (int, float)) else 0
        else:
            size = sum(sizes)
        if operator == "%" and isinstance(left, str):
            _check_arguments((left,), {})
        if size > _MAX_SIZE:
            raise jinja2.TemplateError(f'"{operator}" makes something of size {size:.0e}')
        return super().call_binop(context, operator, left, right)
