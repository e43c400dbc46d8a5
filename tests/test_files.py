"""A recording as a file of any kind, by function and by command; recordings and lines of vLLM's as input."""

import json

import pytest

from pagedinfer.cli import main
from pagedinfer.course import bundled_recording
from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.trace.recording import Recording
from pagedinfer.views import picture_svg
from pagedinfer.views.files import ENDINGS, export_file, load_files
from pagedinfer.views.raster import png_of


@pytest.fixture
def saved(tmp_path):
    return bundled_recording().save(tmp_path / "run.jsonl")


BEGINS = {
    ".html": b"<!doctype html>",
    ".svg": b"<svg",
    ".png": b"\x89PNG",
    ".pftrace": b"\x0a",
    ".csv": b"step,now,",
    ".parquet": b"PAR1",
    ".jsonl": b'{"kind":"meta"',
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_command_writes_every_kind(ending, saved, tmp_path, capsys):
    if ending == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: tables)")
    target = tmp_path / f"out{ending}"
    assert main(["export", str(saved), str(target)]) == 0
    assert target.read_bytes().startswith(BEGINS[ending])
    said = f"{target}: {target.stat().st_size:,} bytes, Recording(84 steps, 8 requests, 263 events)\n"
    assert capsys.readouterr() == (said, "")


def test_options_choose_step_request_and_table(saved, tmp_path):
    recording = Recording.load(saved)
    svg, png, table = (tmp_path / name for name in ("a.svg", "a.png", "a.csv"))
    assert main(["export", str(saved), str(svg), "--step", "10", "--request", "r2"]) == 0
    assert svg.read_text() == picture_svg(recording, 10, "r2") != picture_svg(recording, 10)
    assert main(["export", str(saved), str(png), "--step", "-3"]) == 0
    assert png.read_bytes() == png_of(picture_svg(recording, -3))
    for name, rows in (("requests", 8), ("blocks", len(recording.blocks)), ("events", 263)):
        assert main(["export", str(saved), str(table), "--table", name]) == 0
        assert len(table.read_text().splitlines()) == rows + 1
    export_file(recording, tmp_path / "b.HTML", step=12, request="r1")
    assert '"cursor": 12, "selected": {"request": "r1"}' in (tmp_path / "b.HTML").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["a.txt"],
            "'a.txt': its ending must be one of .html, .svg, .png, .pftrace, .csv, .parquet, .jsonl.",
        ),
        (["no/a.svg"], "'no/a.svg': there is no folder 'no'; create it first."),
        (["."], "'.': it must be a file to write, like run.html, not a folder."),
        (["a.svg", "--step", "99"], "No step 99: the recording has 0 to 84."),
        (
            ["a.svg", "--request", "x"],
            "request='x': the recording has no such request; it has r0, r1, r2, r3, r4, r5, r6, r7.",
        ),
        (["a.csv", "--table", "x"], "table='x': the tables are steps, requests, blocks, events."),
        (["a.csv", "--step", "1"], "step=1: it is for .html, .svg, .png, not for .csv."),
        (["a.csv", "--request", "r1"], "request='r1': it is for .html, .svg, .png, not for .csv."),
        (["a.html", "--table", "steps"], "table='steps': it is for .csv, .parquet, not for .html."),
    ],
)
def test_what_cannot_be_done_is_one_sentence(arguments, said, saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(saved), *arguments]) == 1
    assert capsys.readouterr() == ("", f"pagedinfer: {said}\n")
    assert [path.name for path in tmp_path.iterdir()] == [saved.name]


def test_input_that_is_none(saved, tmp_path):
    with pytest.raises(RecordingError, match=r"^Cannot read .*missing\.jsonl: No such file or directory\.$"):
        load_files(tmp_path / "missing.jsonl")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(RecordingError, match="line 1 is not an event"):
        load_files(tmp_path / "text")
    (tmp_path / "empty").write_text("")
    with pytest.raises(RecordingError, match="it is empty"):
        load_files(tmp_path / "empty")
    with pytest.raises(
        RecordingError, match="only files of its KV-cache events and spans are taken together"
    ):
        load_files(saved, saved)
    with pytest.raises(ConfigError, match="its ending must be one of"):
        export_file(Recording.load(saved), tmp_path / "a")


def test_lines_of_vllm_are_told_from_recordings(tmp_path, capsys):
    kv, spans = tmp_path / "kv.jsonl", tmp_path / "spans.jsonl"
    stored = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 16}
    kv.write_text(json.dumps({"ts": 5.0, "events": [stored | {"token_ids": list(range(32))}]}) + "\n")
    usage = {"gen_ai.usage.prompt_tokens": 3, "gen_ai.usage.completion_tokens": 2, "gen_ai.request.id": "r"}
    span = {
        "name": "llm_request",
        "start_time": 4_000_000_000,
        "end_time": 6_000_000_000,
        "attributes": usage,
    }
    spans.write_text(json.dumps(span) + "\n")
    assert main(["export", str(kv), str(spans), str(tmp_path / "out.jsonl")]) == 0
    recording = Recording.load(tmp_path / "out.jsonl")
    assert recording.requests["request"] == ["r", "store 1"]
    assert recording.info["imported_from"] == "vLLM"
    for ending in (".html", ".svg", ".png", ".pftrace", ".csv"):
        assert main(["export", str(tmp_path / "out.jsonl"), str(tmp_path / f"out{ending}")]) == 0
