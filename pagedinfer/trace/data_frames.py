"""Tables for other tools: CSV by the standard library; pandas, polars and Parquet where their packages are installed.

A column has the same type in every table and tool, whatever its values: `int` is a 64-bit integer that may be missing
(pandas and polars `Int64`, Parquet `int64`), `float` a 64-bit float (missing: NaN in pandas, null elsewhere), `str`
text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from pagedinfer.errors import ConfigError, readable

__all__ = ["arrow_table", "column_types", "csv_text", "pandas_frame", "polars_frame"]

Columns = Mapping[str, Sequence[Any]]
Types = Mapping[str, type]

PANDAS = {int: "Int64", float: "float64", str: "string"}
POLARS = {int: "Int64", float: "Float64", str: "String"}
ARROW = {int: "int64", float: "float64", str: "string"}


def _load(package: str) -> Any:
    """A package of the extra `tables`. By name and on use: recordings themselves need the standard library only.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ConfigError(f'This needs {package}: pip install "pagedinfer[tables]" brings it.') from error


def column_types(columns: Columns, declared: Types) -> dict[str, type]:
    """int, float or str for each column: as declared, else by its values, else int."""
    types: dict[str, type] = {}
    for name, values in columns.items():
        found = {type(value) for value in values if value is not None}
        text = not found <= {int, float, bool}
        types[name] = declared.get(name) or (str if text else float if float in found else int)
    return types


def _values(values: Sequence[Any], kind: type) -> list[Any]:
    """As the column's type has them; text is UTF-8 in all of these tools."""
    return [
        None if value is None else readable(str(value)) if kind is str else kind(value) for value in values
    ]


def pandas_frame(columns: Columns, types: Types) -> Any:
    """A `pandas.DataFrame`."""
    pandas = _load("pandas")
    series = {
        name: pandas.Series(_values(values, types[name]), dtype=PANDAS[types[name]])
        for name, values in columns.items()
    }
    return pandas.DataFrame(series)


def polars_frame(columns: Columns, types: Types) -> Any:
    """A `polars.DataFrame`."""
    polars = _load("polars")
    data = {name: _values(values, types[name]) for name, values in columns.items()}
    return polars.DataFrame(data, schema={name: getattr(polars, POLARS[types[name]]) for name in columns})


def arrow_table(columns: Columns, types: Types) -> tuple[Any, Any]:
    """A `pyarrow.Table`, and the module `pyarrow.parquet` that writes it."""
    arrow = _load("pyarrow")
    schema = arrow.schema([(name, getattr(arrow, ARROW[types[name]])()) for name in columns])
    data = {name: _values(values, types[name]) for name, values in columns.items()}
    return arrow.table(data, schema=schema), import_module("pyarrow.parquet")


def csv_text(columns: Columns) -> str:
    """Comma-separated values with a line of names; what is missing is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return out.getvalue()
