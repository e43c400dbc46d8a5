"""Hygiene of committed notebooks: keep what a static page can show, drop what only a live kernel can.

    python notebooks/clean.py NOTEBOOK ...      (pre-commit runs it)

A widget's view without its state hides the picture beside it in a trusted notebook, and state is large: both go.
Exits with 1 when a file was changed, or is larger than 300 kB.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MAX_BYTES = 400_000


def clean(notebook: dict[str, Any]) -> dict[str, Any]:
    """Clean a notebook in place. Execution counts stay: nbval compares no cell that has outputs and no count."""
    notebook["metadata"] = KERNEL
    for cell in notebook["cells"]:
        cell["metadata"] = {
            name: value for name, value in cell["metadata"].items() if name in ("tags", "jupyter")
        }
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if len(data) > 1:
                data.pop(VIEW, None)
            output.get("metadata", {}).clear()
    return notebook


def dump(notebook: dict[str, Any]) -> str:
    """The notebook as text, in one form."""
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main(paths: Sequence[str]) -> int:
    """Clean files; returns the exit status."""
    status = 0
    for path in map(Path, paths):
        before = path.read_text(encoding="utf-8")
        after = dump(clean(json.loads(before)))
        if after != before:
            path.write_text(after, encoding="utf-8")
            sys.stderr.write(f"cleaned {path}\n")
            status = 1
        if len(after.encode()) > MAX_BYTES:
            sys.stderr.write(f"{path} has {len(after.encode()):,} bytes; at most {MAX_BYTES:,} are allowed\n")
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
