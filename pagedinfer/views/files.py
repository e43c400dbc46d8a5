"""A recording as a file of any kind; the name's ending says which."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from pagedinfer.errors import ConfigError, RecordingError
from pagedinfer.trace.recording import Recording
from pagedinfer.trace.tables import Table
from pagedinfer.trace.vllm_events import load_vllm
from pagedinfer.trace.vllm_lines import is_vllm
from pagedinfer.views.export import export_html
from pagedinfer.views.film import film_of
from pagedinfer.views.picture import picture_svg
from pagedinfer.views.raster import png_of

__all__ = ["ENDINGS", "TABLES", "export_file", "load_files"]

ENDINGS = {
    ".html": "a page with the views and a slider, offline",
    ".svg": "block map and timeline of a step",
    ".png": "the same",
    ".pftrace": "a trace for ui.perfetto.dev",
    ".csv": "a table",
    ".parquet": "a table",
    ".jsonl": "the recording",
}
"""What `export_file` writes, by ending."""

TABLES = ("steps", "requests", "blocks", "events")

USES = {
    "step": (".html", ".svg", ".png"),
    "request": (".html", ".svg", ".png"),
    "table": (".csv", ".parquet"),
}
"""Which endings an option is for."""


def _table(recording: Recording, name: str) -> Table:
    """The recording's table of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TABLES:
        raise ConfigError(f"table={name!r}: the tables are {', '.join(TABLES)}.")
    return recording.events_table() if name == "events" else getattr(recording, name)


def export_file(
    recording: Recording,
    path: str | PathLike[str],
    *,
    step: int | None = None,
    request: str | None = None,
    table: str | None = None,
) -> Path:
    """Write `recording` as `path`'s ending says (`ENDINGS`), and return the path.

    Args:
        recording: what to write.
        path: the file.
        step: of a picture (by default the last step), or where the page opens (by default where it is fullest).
        request: a request to select in the page or the picture.
        table: which table a .csv or .parquet holds: steps (the default), requests, blocks or events.

    Raises:
        ConfigError: no such ending, table or request, an option that the ending has no use for, or a missing package.
        RecordingError: no such step.
    """
    target, ending = Path(path), Path(path).suffix.lower()
    check_ending(target)
    for name, value in (("step", step), ("request", request), ("table", table)):
        if value is not None and ending not in USES[name]:
            raise ConfigError(f"{name}={value!r}: it is for {', '.join(USES[name])}, not for {ending}.")
    film_of(recording).lane(request)  # says so if there is no such request
    match ending:
        case ".html":
            export_html(recording, target, step=step, request=request)
        case ".svg" | ".png":
            svg = picture_svg(recording, -1 if step is None else step, request)
            target.write_bytes(png_of(svg) if ending == ".png" else svg.encode())
        case ".pftrace":
            recording.to_perfetto(target)
        case ".csv":
            _table(recording, table or "steps").to_csv(target)
        case ".parquet":
            _table(recording, table or "steps").to_parquet(target)
        case _:
            recording.save(target)
    return target


def check_ending(path: Path) -> None:
    """Refuse a name that does not say what to write.

    Raises:
        ConfigError: it has another ending.
    """
    if path.suffix.lower() not in ENDINGS:
        raise ConfigError(f"{str(path)!r}: its ending must be one of {', '.join(ENDINGS)}.")


def load_files(*paths: str | PathLike[str]) -> Recording:
    """One recording, or files of KV-cache events and request spans from vLLM, told apart by their first lines.

    Raises:
        RecordingError: a file is neither, or several of which one is a recording.
    """
    first, *others = [_first_line(path) for path in paths]
    if is_vllm(first):
        return load_vllm(*paths)
    if others:
        raise RecordingError(
            f"{paths[0]} holds no lines of vLLM's: only files of its KV-cache events and spans are taken together."
        )
    return Recording.load(paths[0])


def _first_line(path: str | PathLike[str]) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return next((line for line in file if line.strip()), "")
    except OSError as error:
        raise RecordingError(f"Cannot read {path}: {error.strerror or error}.") from error
