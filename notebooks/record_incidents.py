"""Make the recordings that notebook 10 replays: four incidents, simulated (`pagedinfer.course.incidents`, seed 0).

python notebooks/record_incidents.py

No model and no torch; equal on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pagedinfer.course.incidents import INCIDENTS

FOLDER = Path(__file__).resolve().parents[1] / "pagedinfer" / "course" / "recordings"


def record() -> None:
    """Run each incident once and write its file."""
    for name, make in INCIDENTS.items():
        recording = make(0)
        path = recording.save(FOLDER / f"{name}.jsonl", wall=False)
        sys.stdout.write(f"{recording!r} -> {path}\n")


if __name__ == "__main__":
    record()
