"""Make the notebooks from their sources: run them, clean them, write them.

    python notebooks/build.py [NUMBER ...]

`src/NN_title.py` is the source: cells in py:percent form. Two notebooks come of each: `NN_title.ipynb`, with the
learner's cells as stubs, and `solutions/NN_title.ipynb`, where the code that `reveal` shows stands in those cells.
After `# %%` may stand: `check` (the tests compare the cell's output), `exercise=NN.N`, or `setup` and the packages that
the notebook needs (the code is `src/setup.py`, folded away).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clean import KERNEL, clean, dump

from pagedinfer.course import exercises

HERE = Path(__file__).resolve().parent


def sources() -> list[Path]:
    """The sources, in order."""
    return sorted((HERE / "src").glob("[0-9][0-9]_*.py"))


def build(source: Path, *, solved: bool) -> dict[str, Any]:
    """The notebook of a source, without outputs."""
    blocks = source.read_text(encoding="utf-8").split("\n# %%")[1:]
    cells = [
        _cell(f"c{number:02}", *block.split("\n", 1), solved=solved) for number, block in enumerate(blocks)
    ]
    if solved:
        note = "\n\n**This is the solved copy:** the exercises are done, and every check passes."
        cells[0]["source"] = _lines("".join(cells[0]["source"]) + note)
    return {"cells": cells, "metadata": KERNEL, "nbformat": 4, "nbformat_minor": 5}


def _cell(cell_id: str, head: str, body: str, *, solved: bool) -> dict[str, Any]:
    """One cell: `head` is what stands after `# %%`, `body` the lines below."""
    words, text = head.split(), body.strip("\n")
    if "[markdown]" in words:
        text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.splitlines())
        return {"cell_type": "markdown", "id": cell_id, "metadata": {}, "source": _lines(text)}
    tags = ["nbval-check-output"] if "check" in words else []
    metadata: dict[str, Any] = {}
    if "setup" in words:
        packages = ", ".join(f'"{name}"' for name in words[1:])
        text = f"{(HERE / 'src' / 'setup.py').read_text(encoding='utf-8')}\n\nsetup({packages})"
        metadata["jupyter"] = {"source_hidden": True}
    for word in words:
        if word.startswith("exercise="):
            exercise_id = word.removeprefix("exercise=")
            tags += ["exercise", exercise_id]
            text = exercises()[exercise_id].code if solved else text
    if tags:
        metadata["tags"] = tags
    return {"cell_type": "code", "execution_count": None, "id": cell_id, "metadata": metadata, "outputs": [],
            "source": _lines(text)}  # fmt: skip


def target(source: Path, *, solved: bool) -> Path:
    """Where the notebook of a source goes."""
    return (HERE / "solutions" if solved else HERE) / f"{source.stem}.ipynb"


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The notebook with its outputs, run in `folder`; no widget state is kept.

    An output stays as it was first shown: nbval compares each cell before the next one runs, and so before a live view
    that goes on can change its picture.
    """
    import nbformat
    from nbclient import NotebookClient

    class Client(NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] == "update_display_data":
                return None
            return super().process_message(msg, cell, cell_index)

    node = nbformat.reads(dump(notebook), as_version=4)
    place = {"metadata": {"path": str(folder)}}
    Client(node, timeout=300, store_widget_state=False, resources=place).execute()
    executed: dict[str, Any] = json.loads(nbformat.writes(node))
    return executed


def main(numbers: Sequence[str]) -> int:
    """Build the notebooks whose numbers are given, or all; returns the exit status."""
    for source in sources():
        if numbers and source.name[:2] not in numbers:
            continue
        for solved in (False, True):
            path = target(source, solved=solved)
            path.parent.mkdir(exist_ok=True)
            text = dump(clean(execute(build(source, solved=solved), path.parent)))
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path}: {len(text.encode()):,} bytes\n")
    return 0


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
