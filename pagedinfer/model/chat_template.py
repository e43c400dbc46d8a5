"""Chat templates: Jinja that comes with the model, rendered in a sandbox and within bounds.

The settings and functions are those that transformers documents for templates. A template is a program of a
stranger. The sandbox keeps it from Python and its files; the bounds keep it from running for ever: loops and
macros have a number of turns, and operators, calls and filters a size of what they make. What is left to it is
to waste time and memory in one operation: `replace` on two long texts, printing lists nested in lists many times.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from pagedinfer.errors import ModelError, RequestError
from pagedinfer.model.checked import printable

__all__ = ["render_chat"]

_MAX_TURNS = 200_000  # of all loops and macros of one rendering: under a second
_MAX_SIZE = 1 << 22  # characters of a text, entries of a list, bits of a number
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{7}|\*)|\{[^{}]*\d{7}")  # a width of millions, in either style of formats


def render_chat(source: str, variables: Mapping[str, Any]) -> str:
    """Render the template `source` with `variables`.

    Raises:
        ModelError: it is not valid Jinja.
        RequestError: it refuses the variables, fails on them, or exceeds the bounds.

    """
    environment, template, lock = _compile(source)
    try:
        with lock:
            environment.turns_left = _MAX_TURNS
            text = ""
            for piece in template.generate(**variables):
                text += environment.sized(piece)
                environment.sized(text)
            return text
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the model's chat template refuses these messages: {printable(str(error))}"
        ) from error
    except Exception as error:  # whatever Python raises in a stranger's program
        what = printable(f"{type(error).__name__}: {error}")
        raise RequestError(f"the model's chat template fails on these messages ({what})") from error


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> tuple[_Bounded, jinja2.Template, threading.Lock]:
    environment = _Bounded()
    try:
        tree = _Counted().visit(environment.parse(source))
        code = environment.compile(tree)
    except jinja2.TemplateError as error:
        raise ModelError(f"the model's chat template is not valid Jinja: {printable(str(error))}") from error
    except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
        raise ModelError(f"the model's chat template cannot be compiled ({type(error).__name__})") from error
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    return environment, template, threading.Lock()


class _Counted(NodeTransformer):
    """Make each turn of a loop and each call of a macro report, and each concatenation an addition."""

    def _count(self, node: Any) -> nodes.Node:
        report = nodes.Call(nodes.EnvironmentAttribute("turn"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(report, lineno=node.lineno))
        visited: nodes.Node = self.generic_visit(node)
        return visited

    visit_For = visit_Macro = visit_CallBlock = _count  # Jinja's names

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        first, *rest = (nodes.Filter(self.visit(part), "string", [], [], None, None) for part in node.nodes)
        whole: nodes.Expr = first
        for part in rest:
            whole = nodes.Add(whole, part)
        return whole


class _Generation(Extension):
    """`{% generation %}` marks what the model said, for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  # Jinja wants a plain set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Bounded(ImmutableSandboxedEnvironment):
    """The sandbox, with an account of the turns that are left and a limit on sizes."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        self.turns_left = _MAX_TURNS
        del self.globals["lipsum"]  # nonsense of any length
        self.globals.update(
            dict=_make_dict,
            namespace=_make_namespace,
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
        )
        self.filters = {name: self._sized_filter(made) for name, made in self.filters.items()}
        self.filters.update(tojson=_tojson, format=self._format)

    def turn(self) -> str:
        """Count one turn of a loop or one call of a macro."""
        self.turns_left -= 1
        if self.turns_left < 0:
            raise jinja2.TemplateError(f"its loops take more than {_MAX_TURNS} turns")
        return ""

    def sized(self, value: Any) -> Any:
        """Return `value` if it is of a size that a chat may have."""
        if _size(value) > _MAX_SIZE:
            raise jinja2.TemplateError(f"it makes something larger than {_MAX_SIZE}")
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **fields: Any) -> Any:
        """Call a function for a template; a method of Python's own gets no huge number (`ljust`, ...)."""
        method = getattr(function, "__wrapped__", function)  # the sandbox has wrapped `format`
        if isinstance(method, types.BuiltinMethodType):
            self._check_numbers(args, fields)
            if method.__name__ in ("format", "format_map"):
                _check_widths(method.__self__)
        return self.sized(super().call(context, function, *args, **fields))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result would be huge."""
        if operator == "%":
            _check_widths(left)
        elif _result_size(operator, left, right) > _MAX_SIZE:
            raise jinja2.TemplateError(f'"{operator}" makes something larger than {_MAX_SIZE}')
        return super().call_binop(context, operator, left, right)

    def _format(self, form: Any, *args: Any, **fields: Any) -> Any:
        return self.call_binop(None, "%", str(form), fields or args)

    def _sized_filter(self, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def bounded(*args: Any, **fields: Any) -> Any:
            self._check_numbers(args[1:], fields)
            return self.sized(made(*args, **fields))

        return bounded

    def _check_numbers(self, args: tuple[Any, ...], fields: Mapping[str, Any]) -> None:
        for value in (*args, *fields.values()):
            if isinstance(value, int) and abs(value) > _MAX_SIZE:
                raise jinja2.TemplateError(f"it passes a number above {_MAX_SIZE} to a function")


def _check_widths(form: object) -> None:
    if isinstance(form, str) and _WIDE.search(form):
        raise jinja2.TemplateError("it formats with a width of millions")


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, (str, bytes, list, tuple, dict)) else 0


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Size of what an operator would make; 0 for what Python refuses or floats."""
    if operator == "**":
        return _size(left) * abs(right) if isinstance(left, int) and isinstance(right, int) else 0
    if operator == "*" and isinstance(left, int) != isinstance(right, int):
        return abs(left) * _size(right) if isinstance(left, int) else abs(right) * _size(left)
    return _size(left) + _size(right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _make_dict(*args: Any, **fields: Any) -> dict[Any, Any]:
    return dict(*args, **fields)


def _make_namespace(*args: Any, **fields: Any) -> jinja2.utils.Namespace:
    return _Namespace(*args, **fields)


class _Namespace(jinja2.utils.Namespace):
    """A template's variables. Jinja and Python look for names with underscores on objects: none may be set."""

    def __init__(*args: Any, **fields: Any) -> None:  # leaves `self` free for a field
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **fields).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have a field {printable(str(name))}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > 32:
        raise jinja2.TemplateError(f"it indents JSON by {indent}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
