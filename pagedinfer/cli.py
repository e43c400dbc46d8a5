"""The command `pagedinfer`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagedinfer import __version__
from pagedinfer.errors import ConfigError, PagedInferError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    if isinstance(
        sys.stdout, io.TextIOWrapper
    ):  # what its encoding has no letter for is printed as an escape
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            return _main(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can still be noticed
    except BrokenPipeError:
        # `pagedinfer demo | head -1`: nobody reads on, so stop; and leave nothing for the interpreter to flush.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
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
    demo.add_argument("--html", default="demo.html", help="where to write the page (demo.html)")
    _add_export(commands)
    _add_waste(commands)
    commands.add_parser("models", help="list, fetch or find model files", add_help=False)
    options = parser.parse_args(arguments)
    try:
        return {"demo": _demo, "export": _export, "waste": _waste}[options.command](options)
    except PagedInferError as error:
        print(f"pagedinfer: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f'pagedinfer: {error.name} is missing: pip install "pagedinfer[lab]"', file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"pagedinfer: {error.filename or 'the system'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npagedinfer: stopped", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    page = _page(options.html)
    from pagedinfer.demo import run_demo

    return 130 if run_demo(tiny=options.tiny, html=page).stopped else 0


def _page(name: str, option: str = "--html ", example: str = "demo.html") -> Path:
    """The path of the file to write, refused before the run when nothing can be written there."""
    page = Path(name)
    if not name or page.is_dir():
        raise ConfigError(f"{option}{name!r}: it must be a file to write, like {example}, not a folder.")
    if not page.parent.is_dir():
        raise ConfigError(f"{option}{name!r}: there is no folder {str(page.parent)!r}; create it first.")
    if not os.access(page if page.exists() else page.parent, os.W_OK):
        raise ConfigError(f"{option}{name!r}: it cannot be written; choose another place.")
    return page


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="write a recording as a page, picture, table or Perfetto trace",
        description="The ending of OUTPUT says what to write: .html .svg .png .pftrace .csv .parquet .jsonl",
    )
    export.add_argument(
        "input",
        nargs="+",
        help="a recording (JSON lines), or vLLM's KV-cache events and request spans (JSON lines)",
    )
    export.add_argument("output", help="the file to write")
    export.add_argument("--step", type=int, help="step to show; negative numbers count from the end")
    export.add_argument("--request", help="request to select (.html, .svg)")
    export.add_argument("--table", help="steps (default), requests, blocks or events (.csv, .parquet)")


def _export(options: argparse.Namespace) -> int:
    from pagedinfer.views.files import check_ending, export_file, load_files

    target = _page(options.output, "", "run.html")
    check_ending(target)
    recording = load_files(*options.input)
    export_file(recording, target, step=options.step, request=options.request, table=options.table)
    print(f"{target}: {target.stat().st_size:,} bytes, {recording!r}")
    return 0


def _add_waste(commands: Any) -> None:
    waste = commands.add_parser(
        "waste",
        help="what KV memory holds when it is scarce: a trace through every allocator",
        description="Runs a trace's requests through the scheduler, without a model, once per way to give memory out.",
    )
    waste.add_argument(
        "--trace", type=Path, help="an Azure (.csv) or Mooncake (.jsonl) trace (500 bundled requests)"
    )
    waste.add_argument("--requests", type=int, metavar="N", help="only the first N requests")
    waste.add_argument(
        "--seconds-per-step", type=float, default=0.1, help="time of the trace in a step (0.1)"
    )
    for name in ("num-blocks", "block-size", "max-model-len"):
        waste.add_argument(f"--{name}", type=int, metavar="N", help="as in EngineConfig")


def _waste(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from pagedinfer.checks import check_int
    from pagedinfer.sim.waste import EXCERPT, WASTE_CONFIG, waste_table
    from pagedinfer.trace.workload import read_workload

    if options.requests is not None:
        check_int("--requests", options.requests, 1)
    names = ("num_blocks", "block_size", "max_model_len")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config, path = replace(WASTE_CONFIG, **given), options.trace or EXCERPT
    requests = read_workload(path, limit=options.requests)
    table = waste_table(requests, config, seconds_per_step=options.seconds_per_step)
    longer = sum(r.num_prompt_tokens + r.num_output_tokens > config.max_model_len for r in requests)
    print(
        f"{path.name}, {len(requests):,} requests; {longer:,} of more than {config.max_model_len:,} tokens "
        f"(max_model_len) left out; a step is {options.seconds_per_step:g} s of the trace.\n"
        f"{config.num_blocks:,} blocks of {config.block_size} slots: tokens, reserved, tail_slack and free are shares "
        "of them, mean over the\nsteps in which requests wait for memory."
    )
    print(table)
    return 0
