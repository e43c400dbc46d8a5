"""Writes the map in CONTRIBUTING.md: a sentence per module, the first of its docstring."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
START, END = "<!-- the map, written by .ci/map.py -->\n", "<!-- end of the map -->\n"


def lines() -> list[str]:
    """One line a module, under a heading per folder."""
    out, folder = [], None
    files = sorted((ROOT / "pagedinfer").rglob("*.py"), key=lambda p: (str(p.parent), p.name))
    for path in files:
        text = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
        sentence = " ".join(text.split())
        if path.parent != folder:
            folder = path.parent
            heading = folder.relative_to(ROOT).as_posix()
            about = f": {sentence}" if path.name == "__init__.py" else ""
            out += ["", f"**{heading}/**{about}", ""]
        if path.name != "__init__.py":
            out.append(f"- `{path.relative_to(ROOT / 'pagedinfer').as_posix()}`: {sentence}")
    return out[1:]


def main() -> None:
    """Rewrite the section between the two marks."""
    page = ROOT / "CONTRIBUTING.md"
    before, rest = page.read_text(encoding="utf-8").split(START)
    page.write_text(before + START + "\n".join(lines()) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
