"""What the README says is so: its picture, its commands, its code."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PICTURE_STEP = 24
"""A step of the bundled recording at which somebody was preempted and others wait."""

INSTALL = 'pip install -c binder/constraints.txt -e ".[{}]"'


def code_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_two_commands_stand_alone_each_in_one_line():
    assert [block.strip() for block in code_blocks("bash")] == [
        f"python3 -m venv .venv && . .venv/bin/activate && {INSTALL.format('lab')} && pagedinfer demo",
        f". .venv/bin/activate && {INSTALL.format('test')} && pytest",
    ]


def test_the_picture_is_drawn_from_the_bundled_recording_of_a_real_run():
    """To draw it anew: write what the next line gives to notebooks/images/engine.svg."""
    from pagedinfer.course import bundled_recording
    from pagedinfer.views import picture_svg

    recording = bundled_recording()
    assert recording.at(PICTURE_STEP).last.preempted
    drawn = picture_svg(recording, step=PICTURE_STEP)
    assert (ROOT / "notebooks" / "images" / "engine.svg").read_text(encoding="utf-8") == drawn


def test_every_link_leads_to_a_file():
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert links
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


@pytest.mark.parametrize("number", range(len(code_blocks("python"))))
def test_the_python_blocks_run(number, tmp_path, monkeypatch, capsys):
    """As they stand, but with the tiny model, which needs no download."""
    pytest.importorskip("torch", reason="torch is not installed (extra: engine)")
    monkeypatch.chdir(tmp_path)
    source = code_blocks("python")[number].replace('"smollm2-135m"', '"tiny"')
    names = {}
    exec(compile(source, f"README python block {number}", "exec"), names)
    for name in ("engine", "llm"):
        if name in names:
            names[name].close()
