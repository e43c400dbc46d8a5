"""The command `pagedinfer`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pagedinfer import __version__
from pagedinfer.errors import PagedInferError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["models"]:
        from pagedinfer.model.sources import models_main

        return models_main(arguments[1:])
    parser = argparse.ArgumentParser(prog="pagedinfer", description="See inside an LLM inference engine.")
    parser.add_argument("--version", action="version", version=f"pagedinfer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="eight requests in a small pool, live in the terminal and as demo.html"
    )
    demo.add_argument(
        "--tiny", action="store_true", help="a tiny model with random weights; nothing is downloaded"
    )
    demo.add_argument(
        "--html", type=Path, default=Path("demo.html"), help="where to write the page (demo.html)"
    )
    commands.add_parser("models", help="list, fetch or find model files", add_help=False)
    options = parser.parse_args(arguments)
    try:
        return _demo(options)
    except PagedInferError as error:
        print(f"pagedinfer: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f'pagedinfer: {error.name} is missing: pip install "pagedinfer[lab]"', file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npagedinfer: stopped", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    from pagedinfer.demo import run_demo

    run_demo(tiny=options.tiny, html=options.html)
    return 0
