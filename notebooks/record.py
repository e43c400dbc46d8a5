"""Make the recording that notebook 00 replays: eight questions to SmolLM2 in a pool too small for them.

    python notebooks/record.py

Writes `eight_requests.jsonl` (the events, without wall time) and `eight_requests.json` (questions and answers, which
a recording never holds) into `pagedinfer/course/recordings`. Greedy and float32: equal on every machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pagedinfer.config import SamplingParams
from pagedinfer.demo import QUESTIONS
from pagedinfer.llm import LLM
from pagedinfer.session import Session

TARGET = Path(__file__).resolve().parents[1] / "pagedinfer" / "course" / "recordings" / "eight_requests.jsonl"
ARRIVALS = (0, 0, 2, 4, 6, 8, 12, 16)
"""Step after which each question is asked."""


def record() -> None:
    """Run the model once and write both files."""
    llm = LLM(
        "smollm2-135m",
        dtype="float32",
        block_size=8,
        num_blocks=40,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,  # sharing is notebook 08's
    )
    questions: dict[str, str] = {}
    with llm, Session(llm) as session:
        while len(questions) < len(QUESTIONS) or llm.engine.has_unfinished():
            while len(questions) < len(QUESTIONS) and ARRIVALS[len(questions)] <= session.recording.last_step:
                question = QUESTIONS[len(questions)]
                ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
                params = SamplingParams(temperature=0.0, max_tokens=40)
                questions[session.submit({"prompt_token_ids": ids}, params)] = question
            session.step()
        session.recording.save(TARGET, wall=False)
        texts = {
            rid: {"question": question, "answer": session.texts[rid]} for rid, question in questions.items()
        }
    TARGET.with_suffix(".json").write_text(
        json.dumps(texts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    sys.stdout.write(f"{session.recording!r} -> {TARGET}\n")


if __name__ == "__main__":
    record()
