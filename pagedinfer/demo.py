"""`pagedinfer demo`: eight requests arrive over time in a pool too small for them, and one watches.

Everything printed and drawn comes from the engine's own events.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.config import SamplingParams
from pagedinfer.engine.interrupt import DeferredInterrupt
from pagedinfer.engine.output import RequestOutput
from pagedinfer.session import Session

if TYPE_CHECKING:
    from pagedinfer.llm import LLM
    from pagedinfer.trace.recording import Recording

__all__ = ["DemoResult", "run_demo"]

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about a small robot who learns to paint.",
    "Give me three tips for sleeping better.",
    "What does a computer's memory do? Explain it to a child.",
    "Name the planets of the solar system in order from the sun.",
    "How do I make a simple tomato soup?",
    "Tell me a very short story about a fox and the moon.",
)
ARRIVALS = (0, 0, 2, 4, 7, 10, 14, 18)
"""Step after which each request is submitted."""

MODEL, TINY = "smollm2-135m", "tiny"
MAX_TOKENS = 64
BLOCK_SIZE = 16
MAX_STEPS = 5_000


@dataclass(slots=True)
class DemoResult:
    """What the demo saw.

    Attributes:
        recording: the run. texts: answer by request id. prompts: question by request id.
        seconds: wall time of the run, loading excluded. summary: the printed figures, by name.
        stopped: whether Ctrl-C ended it.
    """

    recording: Recording
    texts: dict[str, str] = field(default_factory=dict)
    prompts: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    summary: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


def run_demo(*, tiny: bool = False, html: Path = Path("demo.html"), live: bool | None = None) -> DemoResult:
    """Run the demo, print what it shows, and write `html`, one page that works offline.

    Ctrl-C ends the run early; the page then holds what there was until then.

    Args:
        tiny: the seeded tiny model instead of SmolLM2; nothing is downloaded.
        html: where the page goes.
        live: draw the pool in the terminal; None decides by whether there is one.
    """
    from pagedinfer.views import export_html

    out = sys.stdout
    out.write(f"loading {TINY if tiny else MODEL} ...\n")
    out.flush()
    llm = _load(tiny)
    try:
        config = llm.engine.config
        out.write(
            f"{llm!r}\n8 requests arrive over time; the pool holds {config.num_blocks * config.block_size} tokens.\n\n"
        )
        with Session(llm) as session:
            result = DemoResult(session.recording)
            board = _board(session) if (out.isatty() if live is None else live) else _lines(session)
            start = time.perf_counter()
            try:
                _run(session, llm, result, board, ignore_eos=tiny)  # random weights end where they like
            except KeyboardInterrupt:
                result.stopped = True
            result.seconds = time.perf_counter() - start
            result.texts = {rid: _text(output) for rid, output in session.outputs.items()}
        _summarise(result)
        _print(result)
        export_html(
            result.recording, html, texts=_page_texts(result), summary=result.summary, title="pagedinfer demo"
        )
        last = result.recording.last_step
        what = f"Stopped in step {last}. The run so far" if result.stopped else "The whole run"
        out.write(f"\n{what}, step by step: {html} (open it in a browser; it works offline)\n")
        return result
    finally:
        llm.close()


def _load(tiny: bool) -> LLM:
    with DeferredInterrupt():  # Ctrl-C in the middle of torch's import may be lost, or crash the process
        from pagedinfer.llm import LLM

    # float32, so that the texts are the same on every machine; the pool holds about three of the eight requests at
    # full length, so that some have to give way.
    return LLM(TINY if tiny else MODEL, dtype="float32", block_size=BLOCK_SIZE, num_blocks=22, max_num_seqs=8,
               max_num_batched_tokens=64)  # fmt: skip


def _run(
    session: Session, llm: LLM, result: DemoResult, board: Generator[None, None, None], *, ignore_eos: bool
) -> None:
    """Step until all requests have come and ended; `board` looks on."""
    with closing(board):
        for _ in board:
            _submit_due(session, llm, result, ignore_eos=ignore_eos)
            if not session.engine.has_unfinished() and len(result.prompts) == len(QUESTIONS):
                break
            session.step()


def _submit_due(session: Session, llm: LLM, result: DemoResult, *, ignore_eos: bool) -> None:
    step, idle = session.engine.scheduler.step, not session.engine.has_unfinished()
    while (number := len(result.prompts)) < len(QUESTIONS) and (ARRIVALS[number] <= step or idle):
        question, idle = QUESTIONS[number], False
        ids: Any = llm.tokenizer.apply_chat_template([{"role": "user", "content": question}])
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos)
        result.prompts[session.submit({"prompt_token_ids": ids}, params)] = question


# -- watching -------------------------------------------------------------------------------------------------------


def _lines(session: Session) -> Generator[None, None, None]:
    """Plain lines for logs and pipes: one every ten steps, and whenever somebody is preempted."""
    from pagedinfer.views import describe

    for _ in range(MAX_STEPS):
        yield
        step = session.recording.last_step
        if step and (step % 10 == 1 or session.recording.at(step).last.preempted):
            sys.stdout.write(describe(session.recording, step) + "\n")
            sys.stdout.flush()


def _board(session: Session) -> Generator[None, None, None]:
    """The pool and the queues, redrawn in place with rich."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=False) as screen:
        for _ in range(MAX_STEPS):
            yield
            screen.update(_panel(session), refresh=True)


def _panel(session: Session) -> Any:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    state = session.recording.at(-1)
    colours = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
    numbers = {rid: int(rid.removeprefix("r")) for rid in state.requests}
    owners = {block: rid for rid, request in state.requests.items() for block in request.block_table}
    pool = Text("pool   ")
    for block in range(state.num_blocks):
        rid = owners.get(block)
        pool.append(
            "·" if rid is None else str(numbers[rid]), style=colours[numbers[rid] % 8] if rid else "dim"
        )
        pool.append(" ")
    table = Table(box=None, pad_edge=False)
    for name in ("request", "state", "tokens", "in this step"):
        table.add_column(name, justify="left")
    for rid, request in sorted(state.requests.items(), key=lambda pair: pair[1].arrival):
        n = state.last.scheduled.get(rid)
        work = (
            f"{n} token{'s' if n != 1 else ''}"
            if n
            else state.last.causes.get(rid) or state.last.reasons.get(rid, "")
        )
        style = colours[numbers[rid] % 8]
        table.add_row(
            Text(rid, style=style),
            request.status,
            f"{request.num_computed_tokens}/{request.num_tokens}",
            work,
        )
    return Group(Text(f"step {state.step}"), pool, table)


# -- telling --------------------------------------------------------------------------------------------------------


def _summarise(result: DemoResult) -> None:
    requests, steps = result.recording.requests, result.recording.steps
    tokens = sum(requests["output_tokens"])
    ttft = [value for value in requests["ttft_s"] if value is not None]
    tpot = [value for value in requests["tpot_s"] if value is not None]
    waste = [value for value, used in zip(steps["kv_waste"], steps["used_blocks"], strict=True) if used]
    result.summary = {
        "requests": str(len(requests)),
        "steps": str(result.recording.num_steps),
        "tokens": f"{tokens} in {result.seconds:.1f} s",
        "speed": f"{tokens / result.seconds:.0f} tokens/s",
        "TTFT, median": _of(statistics.median, ttft, _ms),
        "TTFT, longest": _of(max, ttft, _ms),
        "TPOT, median": _of(statistics.median, tpot, _ms),
        "preemptions": str(sum(requests["preemptions"])),
        "KV waste, mean": _of(statistics.mean, waste, "{:.1%}".format),
        "KV usage, peak": _of(max, steps["kv_usage"], "{:.0%}".format),
    }


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _of(measure: Callable[[list[float]], float], values: list[float], say: Callable[[float], str]) -> str:
    """A measure in words; "-" where a run that was stopped has no values yet."""
    return say(measure(values)) if values else "-"


def _text(output: RequestOutput) -> str:
    """The answer; an ellipsis says that it was cut at the most tokens."""
    first = output.outputs[0]
    return first.text.strip() + (" …" if first.finish_reason == "length" else "")


def _page_texts(result: DemoResult) -> dict[str, str]:
    return {rid: f"{question}\n{result.texts.get(rid, '')}" for rid, question in result.prompts.items()}


def _print(result: DemoResult) -> None:
    for rid, question in result.prompts.items():
        answer = result.texts.get(rid, "").replace("\n", "\n      ")
        sys.stdout.write(f"\n{rid}  > {question}\n      {answer}\n")
    sys.stdout.write("\n")
    for name, value in result.summary.items():
        sys.stdout.write(f"{name:>14}  {value}\n")
    sys.stdout.write(
        f"{'':>14}  (KV waste: share of token slots taken that hold no token of a live request, cached ones too)\n"
    )
