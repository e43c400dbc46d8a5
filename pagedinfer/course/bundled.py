"""Recordings that come with the package, to look at without a model and without torch."""

from __future__ import annotations

import json
from importlib.resources import files

from pagedinfer.errors import ConfigError
from pagedinfer.trace.recording import Recording

__all__ = ["bundled_prompts", "bundled_recording", "bundled_texts"]

_FOLDER = files("pagedinfer.course") / "recordings"


def bundled_recording(name: str = "eight_requests") -> Recording:
    """A recording of a real run; `notebooks/record.py` made it.

    "eight_requests": SmolLM2-135M answers eight questions in a pool that is too small for them.
    "shared_prompt": five questions under one system prompt, with the prefix cache; the last has three answers.

    Raises:
        ConfigError: there is none of this name.
    """
    return Recording.from_jsonl(_read(f"{name}.jsonl"), name)


def bundled_texts(name: str = "eight_requests") -> dict[str, str]:
    """Question and answer of each request of a bundled recording, by request id. A recording itself holds no text."""
    texts = json.loads(_read(f"{name}.json"))
    return {rid: f"{text['question']}\n{text['answer']}" for rid, text in texts.items()}


def bundled_prompts(name: str = "shared_prompt") -> dict[str, list[str]]:
    """The prompt of each request of a bundled recording as the texts of its tokens, by request id.

    Raises:
        ConfigError: there is no such recording, or it has no prompts.
    """
    prompts = {
        rid: text["prompt"] for rid, text in json.loads(_read(f"{name}.json")).items() if "prompt" in text
    }
    if not prompts:
        raise ConfigError(f"The recording {name!r} comes without its prompts' tokens.")
    return prompts


def _read(filename: str) -> str:
    path = _FOLDER / filename
    if not path.is_file():
        known = sorted(
            file.name.removesuffix(".jsonl") for file in _FOLDER.iterdir() if file.name.endswith(".jsonl")
        )
        raise ConfigError(f"No bundled {filename!r}; the recordings are: {', '.join(known)}.")
    return path.read_text(encoding="utf-8")
