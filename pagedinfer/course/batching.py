"""Exercises of notebook 03: predict two schedules, write static batching, measure goodput, admit better. No torch."""

from __future__ import annotations

import random
from math import inf
from typing import Any

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.course.exercise import Exercise, NotStarted, NotYet, call, shown
from pagedinfer.course.traffic import ROOMY, TIGHT, Workload, run_traffic
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.look import RequestView, SchedulerView
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import count
from pagedinfer.session import Session
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.metrics import goodput
from pagedinfer.trace.recording import Recording

__all__ = ["EXERCISES", "StaticBatching", "six_requests"]

OUTPUTS, SEATS = (12, 3, 4, 9, 5, 3), 2
"""The requests of exercise 03.1, in order of arrival, and the seats they share."""
RUNS = 6
TTFT, TPOT, GOAL = 150, 1.2, 0.7
"""The objectives of exercise 03.4 in steps, and the share of requests that must meet both."""
SEEDS = (2, 5)


class StaticBatching(Policy):
    """Nobody joins a batch that has begun."""

    def admit(self, request: RequestView, view: SchedulerView) -> str | None:
        """Only those that begin together."""
        if view.num_running > view.num_admitted:
            return "the batch is closed until all of it have ended"
        return super().admit(request, view)


STATIC = """
class StaticBatching(Policy):
    def admit(self, request, view):
        if view.num_running > view.num_admitted:
            return "the batch is closed until all of it have ended"
        return super().admit(request, view)
"""

SHARE = """
def share_served_well(rows, ttft, tpot):
    well = 0
    for row in rows:
        if row["finished"] is None:
            continue
        well += row["ttft_steps"] <= ttft and (row["tpot_steps"] is None or row["tpot_steps"] <= tpot)
    return well / len(rows)
"""

CAREFUL = """
class MyAdmission(Policy):
    def admit(self, request, view):
        def expected(r):  # blocks that r is likely to hold before others give theirs back
            return view.blocks_for(max(r.num_tokens, r.num_prompt_tokens + 30))

        growth = sum(expected(r) - view.num_held_blocks(r) for r in view.running)
        needed = expected(request)
        if view.num_running and needed + growth > view.num_free_blocks:
            return f"may need {needed} blocks, the others {growth} more, {view.num_free_blocks} free"
        return view.shortage(request)
"""


# -- 03.1: two schedules --------------------------------------------------------------------------------------------


def six_requests(policy: type[Policy] = Policy) -> Recording:
    """`OUTPUTS` asked for at once, `SEATS` at a time; their prompts are short."""
    config = EngineConfig(num_blocks=64, block_size=8, max_num_seqs=SEATS)
    with Engine(config, SimulatedRunner(), policy=policy(config)) as engine, Session(engine) as session:
        for number, length in enumerate(OUTPUTS):
            params = SamplingParams(max_tokens=length, detokenize=False)
            session.submit({"prompt_token_ids": [number] * 4}, params)
        return session.run()


def judge_steps(static: Any, continuous: Any) -> str:
    """Steps until the last of six requests has ended, under both ways of batching."""
    wanted = {
        "static": six_requests(StaticBatching).last_step, "continuous": six_requests().last_step
    }  # fmt: skip
    for name, answer in (("static", static), ("continuous", continuous)):
        if answer == wanted[name]:
            continue
        if answer == sum(OUTPUTS):
            raise NotYet(f"{name}: {answer} steps is one request after the other; {SEATS} run at a time.")
        if answer == -(-sum(OUTPUTS) // SEATS):
            raise NotYet(
                f"{name}: {answer} steps would do if no seat were ever empty. Draw the seats, and see."
            )
        if name == "static" and answer == wanted["continuous"]:
            raise NotYet("static: does the third request wait for the first, or only for the second to end?")
        if name == "continuous" and answer == wanted["static"]:
            raise NotYet(
                "static is right. continuous: a seat is given on in the step after its request ends."
            )
        raise NotYet(f"{name}: not {shown(answer)}. Draw a row for each seat, a cell for each step.")
    return f"static {static} steps, continuous {continuous}, for the same {sum(OUTPUTS)} tokens."


# -- 03.2: static batching ------------------------------------------------------------------------------------------


def judge_static(policy: Any) -> str:
    """The learner's policy on random arrivals: who joined when, against the rule."""
    _check_class(policy)
    batches = 0
    for seed in range(RUNS):
        rng = random.Random(seed)
        workload = Workload(14, rng.uniform(2, 6), (4, 16), (1, 24), 24, 256, rng.randint(2, 5))
        mine = _run(workload, seed, policy)
        _compare_batches(mine, run_traffic(workload, seed, StaticBatching), workload.max_num_seqs)
        batches += len(set(mine.requests["admitted"]))
    return f"{batches} batches in {RUNS} runs: each closed until its last request had ended, none smaller than need be."


def _compare_batches(mine: Recording, rule: Recording, seats: int) -> None:
    rows = list(mine.requests.rows())
    for row in rows:
        step, rid = row["admitted"], row["request"]
        before = mine.at(step - 1).running
        if before:
            raise NotYet(
                f"In step {step}, {rid} joined while {before[0]} of an earlier batch was still running.",
                "A static batch takes nobody in before all of it have ended.",
            )
    wanted = {row["request"]: row["admitted"] for row in rule.requests.rows()}
    for row in rows:
        if row["admitted"] != wanted[row["request"]]:
            step = wanted[row["request"]]
            joined = len(mine.at(step).last.admitted)
            raise NotYet(
                f"In step {step} only {joined} of {seats} seats were taken, although {row['request']} was waiting.",
                "view.num_running counts those that have just been admitted, too; view.num_admitted counts them alone.",
            )


def _check_class(policy: Any) -> None:
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise NotYet(f"The check wants your class, made from Policy; it got {shown(policy)}.")


def _run(workload: Workload, seed: int, policy: Any) -> Recording:
    """A run under the learner's policy; what the engine had to overrule is told."""
    try:
        recording = run_traffic(workload, seed, policy)
    except (
        Exception,
        SystemExit,
    ) as error:  # a policy's mistakes are caught by the engine; this is the class itself
        raise NotYet(f"{policy.__name__} raised {type(error).__name__}: {error}") from error
    for event in recording.errors:
        if "NotImplementedError" in event.what:
            raise NotStarted("admit is still the stub: write its body.")
        raise NotYet(f"In step {event.step}: {event.what}.")
    return recording


# -- 03.3: goodput --------------------------------------------------------------------------------------------------


def judge_share(share_served_well: Any) -> str:
    """The learner's measure on simulated runs, some of them stopped half-way, against the library's."""
    cases = [
        (run.until(step), ttft, tpot)
        for seed in range(3)
        for workload in (ROOMY, TIGHT)
        for run in [run_traffic(workload, seed)]
        for step in (run.last_step, run.last_step // 2)
        for ttft, tpot in ((20, 1.0), (80, 1.1), (200, 1.5))
    ]
    single = Workload(6, 3.0, (4, 8), (1, 2), 24, 256, 2)
    cases += [(run_traffic(single, seed), 5, 1.0) for seed in range(3)]
    for recording, ttft, tpot in cases:
        rows = list(recording.requests.rows())
        got = call(share_served_well, [dict(row) for row in rows], ttft, tpot)
        wanted = goodput(recording, ttft=ttft, tpot=tpot).share
        if isinstance(got, bool) or not isinstance(got, int | float):
            raise NotYet(
                f"share_served_well should return a number from 0 to 1; yours returned {shown(got)}."
            )
        if abs(got - wanted) > 1e-9:
            raise NotYet(
                f"{len(rows)} requests, ttft={ttft}, tpot={tpot}: {wanted:.0%} were served well, yours says {got:.3g}.",
                *_why_share(rows, ttft, tpot, float(got)),
            )
    return f"Right on {len(cases)} runs, half-finished ones among them."


def _why_share(rows: list[dict[str, Any]], ttft: float, tpot: float, got: float) -> tuple[str, ...]:
    def share(first: float, each: float, ended: bool) -> float:
        well = [
            (row["ttft_steps"] if row["ttft_steps"] is not None else inf) <= first
            and (row["tpot_steps"] or 0) <= each
            and (row["finished"] is not None or not ended)
            for row in rows
        ]
        return float(sum(well) / len(rows))

    suspects = (
        (share(ttft, tpot, False), "A request that has not ended is not served yet."),
        (share(ttft, inf, True), "That is the share that met the limit for TTFT; there is one for TPOT."),
        (share(inf, tpot, True), "That is the share that met the limit for TPOT; there is one for TTFT."),
        (got if got > 1 else -1.0, "A share is from 0 to 1: divide by the number of requests."),
    )
    return tuple(text for value, text in suspects if abs(value - got) < 1e-9)[:1]


# -- 03.4: admission ------------------------------------------------------------------------------------------------


def judge_admission(policy: Any) -> str:
    """The learner's admission on two runs that the notebook does not show."""
    _check_class(policy)
    results = []
    for seed in SEEDS:
        mine, default = _run(TIGHT, seed, policy), run_traffic(TIGHT, seed)
        found, usual = (goodput(run, ttft=TTFT, tpot=TPOT) for run in (mine, default))
        results.append(found.share)
        if found.share < GOAL:
            raise NotYet(
                f"Seed {seed}: {found.share:.0%} of the requests met both objectives (the default: {usual.share:.0%}); "
                f"the goal is {GOAL:.0%}.",
                _why_missed(mine),
            )
    shares = " and ".join(f"{share:.0%}" for share in results)
    return f"{shares} met both objectives, on two runs that you had not seen."


def _why_missed(recording: Recording) -> str:
    rows = list(recording.requests.rows())
    late = sum(row["ttft_steps"] > TTFT for row in rows)
    slow = sum((row["tpot_steps"] or 0) > TPOT for row in rows)
    lost = count(sum(row["preemptions"] for row in rows), "preemption")
    numbers = f"{late} came too late to their first token, {slow} were too slow after it; {lost}."
    if slow > late:
        return f"{numbers} You admit too many: they grow, and take each other's blocks."
    return f"{numbers} You admit too few: they wait while blocks are free."


EXERCISES = (
    Exercise(
        id="03.1",
        title="Two schedules",
        judge=judge_steps,
        hints=(
            "Draw two rows, a cell for each step. A request takes as many cells as it has output tokens.",
            "Static: the batches are (12, 3), (4, 9), (5, 3), and each lasts as long as its longest.",
            "Continuous: the first seat is r0's up to step 12. The second goes to r1 (3), r2 (4), r3 (9). Who comes "
            "next, and where?",
        ),
        answer="static, continuous = 26, 19",
        why="A static batch pays for its longest request in every seat. Continuous batching pays for what is computed.",
    ),
    Exercise(
        id="03.2",
        title="Static batching",
        judge=judge_static,
        hints=(
            "admit is asked for one request after the other, within one step. It must say no while somebody of an "
            "earlier step is running.",
            "view.num_running counts everybody in the batch, also those that were admitted a moment ago.",
            'If view.num_running > view.num_admitted, return a sentence, like "the batch is closed"; otherwise '
            "super().admit(request, view).",
        ),
        answer=STATIC,
        why="Two lines turn an engine of 2023 into one of 2020. The other direction took a paper (Orca, OSDI 2022).",
    ),
    Exercise(
        id="03.3",
        title="Goodput",
        judge=judge_share,
        hints=(
            'A row counts when row["finished"] is not None, its ttft_steps are at most ttft, and its tpot_steps '
            "at most tpot.",
            "A request of one token has no gap between tokens: its tpot_steps is None, and it keeps any limit.",
            "Divide by the number of all rows: a request that has not ended counts, and is not served well.",
        ),
        answer=SHARE,
        why="Tokens per second can be high while nobody is served well. Goodput counts what was served as promised.",
    ),
    Exercise(
        id="03.4",
        title="Admit better",
        judge=judge_admission,
        hints=(
            "Look at the timeline: requests come in soon, and are preempted later. How many would the pool hold to "
            "their ends?",
            "An answer has 40 to 80 tokens, so a request comes to hold 6 to 13 blocks, and the pool has 32. Not all "
            "are at their longest at the same time.",
            "Reserve in mind: for each request blocks_for(num_prompt_tokens + 30). Admit while these fit into the "
            "pool. (Or simply keep four or five running.)",
        ),
        answer=CAREFUL,
        why="An admission is a bet on lengths that nobody knows. Reserving for the longest answer wastes the pool, "
        "reserving for nothing wastes what was computed; expecting something in between wins.",
    ),
)
