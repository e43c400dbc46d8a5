"""Tables in other tools: the same values and the same types in CSV, pandas, polars and Parquet."""

import csv
import sys

import pytest

from pagedinfer.errors import ConfigError
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.tables import Table

pandas = pytest.importorskip("pandas", reason="pandas is not installed (extra: tables)")
polars = pytest.importorskip("polars", reason="polars is not installed (extra: tables)")
parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed (extra: tables)")

TABLES = {
    "steps": lambda recording: recording.steps,
    "requests": lambda recording: recording.requests,
    "blocks": lambda recording: recording.blocks,
    "events": lambda recording: recording.events_table(),
}


def dtypes(table, folder):
    """Types of the columns in each tool, by their names there."""
    frame = table.to_pandas()
    return {
        "pandas": {name: str(kind) for name, kind in frame.dtypes.items()},
        "polars": {name: str(kind) for name, kind in table.to_polars().schema.items()},
        "parquet": {
            f.name: str(f.type) for f in parquet.read_table(table.to_parquet(folder / "t.parquet")).schema
        },
    }


@pytest.fixture
def recording(simulated_run):
    return simulated_run(
        seed=4, num_blocks=12, block_size=4, prompts=(4, 20), outputs=(2, 20), aborts=0.1
    ).finish()


@pytest.mark.parametrize("name", TABLES)
def test_values_come_through_every_tool(name, recording, tmp_path):
    table = TABLES[name](recording)
    rows = list(table.rows())
    assert len(rows) > 5
    assert table.to_polars().to_dicts() == rows
    assert parquet.read_table(table.to_parquet(tmp_path / "t.parquet")).to_pylist() == rows
    frame = table.to_pandas()
    frame = frame.astype(object).where(frame.notna(), None)
    assert frame.to_dict("records") == rows
    with open(table.to_csv(tmp_path / "t.csv"), encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert read == [{key: "" if v is None else str(v) for key, v in row.items()} for row in rows]


@pytest.mark.parametrize("name", TABLES)
def test_types_are_the_same_whatever_a_recording_holds(name, recording, tmp_path):
    meta = Meta(SCHEMA, {"num_blocks": 4, "block_size": 2})
    meta.step = 0
    full, empty = (TABLES[name](r) for r in (recording, Recording([meta])))
    assert full.types == empty.types
    expected = dtypes(full, tmp_path)
    assert set(expected["pandas"].values()) <= {"Int64", "float64", "string"}
    assert set(expected["parquet"].values()) <= {"int64", "double", "string"}
    if name != "events":  # its first row is `meta`, in every recording
        assert len(empty) == 0
    assert dtypes(empty, tmp_path) == expected
    timed = Recording(recording.events)
    for i, event in enumerate(timed.events):
        event.t = i / 8
    assert dtypes(TABLES[name](timed), tmp_path) == expected


def test_types_by_value_and_as_declared():
    columns = {"a": [1, None], "b": [1, 0.5], "c": ["x", None], "d": [None], "e": [True, False], "f": [1, 2]}
    table = Table({**columns, "d": [None, None]}, {"f": float})
    assert table.types == {"a": int, "b": float, "c": str, "d": int, "e": int, "f": float}
    assert Table(columns).types["f"] is int


def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path):
    table = Table({"a": [1]})
    for package, use in (
        ("pandas", table.to_pandas),
        ("polars", table.to_polars),
        ("pyarrow", lambda: table.to_parquet(tmp_path / "t.parquet")),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        said = rf'^This needs {package}: pip install "pagedinfer\[tables\]" brings it\.$'
        with pytest.raises(ConfigError, match=said):
            use()
    assert not list(tmp_path.iterdir())


def test_one_row_an_event(recording):
    table = recording.events_table()
    assert len(table) == len(recording.events)
    row = next(row for row in table.rows() if row["kind"] == "submit")
    event = next(event for event in recording.events if event.kind == "submit")
    assert (row["seq"], row["step"], row["t"], row["request"]) == (event.seq, event.step, None, event.rid)
    assert f'"num_prompt_tokens":{event.num_prompt_tokens}' in row["fields"]
    assert table["request"][0] is None
