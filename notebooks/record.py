"""Make the recordings that notebooks replay: SmolLM2 answers, in pools too small or with beginnings that are shared.

    python notebooks/record.py [NAME ...]

Writes for each `NAME.jsonl` (the events, without wall time) and `NAME.json` (questions, answers and the prompts' tokens
as text, which a recording never holds) into `pagedinfer/course/recordings`. Float32: equal on every machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedinfer.config import SamplingParams
from pagedinfer.demo import QUESTIONS
from pagedinfer.llm import LLM
from pagedinfer.session import Session

TARGET = Path(__file__).resolve().parents[1] / "pagedinfer" / "course" / "recordings"


@dataclass(frozen=True)
class Run:
    """What to record: settings of the engine, and for each question the step after which it is asked, and its n."""

    settings: dict[str, Any]
    questions: tuple[tuple[str, int, int], ...]
    system: str = ""
    max_tokens: int = 40
    keep_prompts: bool = False


ARRIVALS = (0, 0, 2, 4, 6, 8, 12, 16)
RUNS = {
    # Notebook 00: too many for the pool. Without the prefix cache: sharing is notebook 08's.
    "eight_requests": Run(
        {
            "block_size": 8,
            "num_blocks": 40,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
        },
        tuple((question, step, 1) for question, step in zip(QUESTIONS, ARRIVALS, strict=True)),
    ),
    # Notebook 08: one system prompt, one question twice, and one with three answers.
    "shared_prompt": Run(
        {"block_size": 8, "num_blocks": 48, "max_num_seqs": 8, "max_num_batched_tokens": 64},
        (
            ("Why is the sky blue?", 0, 1),
            ("Why is the sky dark at night?", 4, 1),
            ("What do bees eat?", 8, 1),
            ("Why is the sky dark at night?", 12, 1),
            ("Tell me how a story about a dragon begins.", 16, 3),
        ),
        system="You are a teacher of small children. Answer every question kindly, in one short sentence with simple "
        "words, and do not use numbers or lists in your answer.",
        max_tokens=28,
        keep_prompts=True,
    ),
}


def record(name: str) -> None:
    """Run the model once and write both files."""
    run = RUNS[name]
    texts: dict[str, dict[str, Any]] = {}
    with LLM("smollm2-135m", dtype="float32", **run.settings) as llm, Session(llm) as session:
        asked: dict[str, tuple[str, list[int]]] = {}
        while len(asked) < len(run.questions) or llm.engine.has_unfinished():
            for question, step, n in run.questions[len(asked) :]:
                if step > session.recording.last_step:
                    break
                messages = [{"role": "user", "content": question}]
                if run.system:
                    messages.insert(0, {"role": "system", "content": run.system})
                ids = llm.tokenizer.apply_chat_template(messages)
                how = SamplingParams(
                    temperature=0.0 if n == 1 else 0.9, seed=3, n=n, max_tokens=run.max_tokens
                )
                asked[session.submit({"prompt_token_ids": ids}, how)] = question, ids
            session.step()
        for rid, (question, ids) in asked.items():
            outputs = session.outputs[rid].outputs
            for index, output in enumerate(outputs):
                text: dict[str, Any] = {"question": question, "answer": output.text}
                if run.keep_prompts:
                    text["prompt"] = [
                        llm.tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids
                    ]
                texts[rid if len(outputs) == 1 else f"{rid}.{index}"] = text
        path = TARGET / f"{name}.jsonl"
        session.recording.save(path, wall=False)
        path.with_suffix(".json").write_text(
            json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        sys.stdout.write(f"{session.recording!r} -> {path}\n")


def main(names: Sequence[str]) -> int:
    """Make the recordings that are named, or all; returns the exit status."""
    for name in names or RUNS:
        record(name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
