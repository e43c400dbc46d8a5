"""Reports about one request: every statement beside the recording, and the re-simulation beside a fork by hand."""

import json
from collections import Counter

import pytest
from simulated_runs import CROWDED, Run, random_run
from test_metrics import twin_phases, without_cancelled

from pagedinfer import EngineConfig, Recorder, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.errors import ConfigError, RequestTooLong, UnknownRequest
from pagedinfer.sim.advice import Help, best_of
from pagedinfer.sim.fork import fork
from pagedinfer.sim.player import Player
from pagedinfer.sim.report import LOST, WAITING, Cause
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.sim.why import default_candidates, why
from pagedinfer.trace.vllm_events import from_vllm

SMALL = EngineConfig(num_blocks=4, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, max_model_len=20)


def story():
    run = Run(SMALL)
    run.submit("a", 3, 4)
    run.submit("b", 3, 4)
    return run.drain()


def told(recording):
    """The engine's own words for the one preemption of the story."""
    return next(event.why for event in recording.events if event.kind == "preempt")


def test_a_preempted_request():
    recording = story()
    report = why(recording, "b")
    assert report.sentences == [
        "b ended (length) after 6 steps: TTFT 1, 4 tokens produced.",
        "Its 6 steps: prefill 1 (17%, step 1), decode 3 (50%, steps 2, 5 to 6), preempted 2 (33%, steps 3 to 4).",
        "It waited 1 step, step 3: b was preempted in this step.",
        "It waited 1 step, step 4: needs 3 blocks, 1 free.",
        "In those 2 steps others were computed: a in 2.",
        f"It was preempted, step 3: {told(recording)}.",
        "4 tokens had to be computed again, step 5.",
        "What would have helped most: num_blocks=6, E2E 2 steps shorter.",
        "The price of num_blocks=6: more memory (num_blocks is 4), the others' TTFT and E2E not longer, makespan "
        "2 steps shorter.",
        "Re-simulated from the first step: num_blocks=6 (E2E 2 steps shorter), num_blocks=8 (E2E 2 steps shorter), "
        "admission=full-reservation (TTFT 4 steps longer and E2E 2 steps longer).",
        "Re-simulated without a difference to it: max_num_batched_tokens=32, max_num_seqs=8, "
        "victim=fewest-tokens-lost, preempt_mode=swap, num_host_blocks=4.",
    ]
    assert str(report) == repr(report) == "\n".join(report.sentences)
    assert report._repr_html_().startswith("<p><b>b ended (length)")
    assert report._repr_html_().count("<li>") == 10


def test_the_one_it_was_preempted_for():
    recording = story()
    report = why(recording, "a")
    assert report.sentences == [
        "a ended (length) after 4 steps: TTFT 1, 4 tokens produced.",
        "Nothing waited: it was computed in every step, steps 1 to 4.",
        f"b was preempted for it, step 3: {told(recording)}.",
        "Nothing waited, so no change of the engine's settings was tried.",
    ]
    assert report.helps == []
    assert report.best is None


def test_an_idle_run():
    run = Run()
    run.submit("only", 3, 2)
    report = why(run.drain(), "only")
    assert report.sentences[1:] == [
        "Nothing waited: it was computed in every step, steps 1 to 2.",
        "Nothing waited, so no change of the engine's settings was tried.",
    ]


def test_head_of_line_blocking():
    """c waits behind b, which needs more blocks than are free; c itself would have fit."""
    run = Run(
        EngineConfig(num_blocks=8, block_size=2, max_num_batched_tokens=16, max_num_seqs=4, watermark=0.0)
    )
    run.submit("a", 8, 4)
    run.submit("b", 12, 2)
    run.submit("c", 1, 1)
    report = why(run.drain(), "c")
    assert str(report.causes[0]).startswith("behind b: at first needs 6 blocks, ")
    assert report.causes[0].steps == report.phases.steps("queue")
    assert report.best.changes == {"order": "shortest-prefill"}
    gains = {found.name: found.ttft for found in report.helps}
    assert gains["order=shortest-prefill"] == 4
    assert gains["num_blocks=12"] == 3  # not 4: in the first step the budget goes to a and b


def test_seats():
    run = Run(EngineConfig(num_blocks=80, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    run.submit("a", 2, 5)
    run.submit("b", 2, 1)
    report = why(run.drain(), "b")
    assert [(cause.sentence, cause.steps) for cause in report.causes] == [
        ("the only seat (max_num_seqs) is taken", [1, 2, 3, 4, 5])
    ]
    assert report.best.name == "max_num_seqs=2"


@pytest.mark.parametrize("seed", range(8))
def test_statements_beside_the_recording(seed):
    recording = random_run(seed)
    twin = twin_phases(recording)
    events = without_cancelled(recording.events)
    for rid in recording.requests["request"]:
        report = why(recording, rid, candidates=[])
        by_step, again = twin[rid]
        assert report.phases.by_step == by_step
        assert report.phases.num_recomputed_tokens == again
        waited = [step for step, phase in by_step.items() if phase in WAITING]
        assert sorted(step for cause in report.causes for step in cause.steps) == waited
        plans = {e.i: e for e in events if e.kind == "step"}
        for cause in report.causes:
            told = {step: _told(plans[step], rid) for step in cause.steps}
            if cause.sentence.startswith("it ended in this step ("):
                assert cause.steps == [report.life.steps.finished]
                continue
            assert Counter(front for front, _ in told.values() if front) == cause.fronts
            sentences = [said for _, said in told.values()]
            assert (sentences[0], sentences[-1]) == (cause.sentence, cause.last)
        scheduled = {e.i: e.scheduled for e in events if e.kind == "step"}
        assert report.ran_meanwhile == {
            other: [step for step in waited if other in scheduled[step]] for other in report.ran_meanwhile
        }
        assert set(report.ran_meanwhile) == {other for step in waited for other in scheduled[step]}
        mine = [e for e in events if e.kind == "preempt" and e.rid == rid]
        assert [why_ for _, why_ in report.preempted] == [e.why for e in mine]
        theirs = [
            e.rid for e in events if e.kind == "preempt" and e.rid != rid and e.why.startswith(f"{rid} ")
        ]
        assert [other for _, other, _ in report.preempted_for_it] == theirs
        assert report.sentences


def _told(plan, rid):
    """Who was in front of a request that a plan left out, and the sentence that says why; the slow way."""
    if rid in plan.reasons:
        return "", plan.reasons[rid]
    left = [other for other in plan.reasons if other not in plan.scheduled]
    return (left[-1], plan.reasons[left[-1]]) if left else ("", "no reason was told")


@pytest.mark.parametrize("seed", range(4))
def test_what_would_have_helped_beside_forks_by_hand(seed):
    recording = random_run(seed)
    plain = fork(recording, 0).recording.requests
    slow = [
        rid for rid, phases in twin_phases(recording).items() if any(p in LOST for p in phases[0].values())
    ]
    for rid in slow[:3]:
        report = why(recording, rid)
        spent = set(report.phases.by_step.values())
        assert (
            len(report.helps)
            == len(default_candidates(recording, spent))
            <= len(default_candidates(recording))
        )
        for found in report.helps:
            other = fork(recording, 0, **found.changes).recording.requests
            before, after = (dict(zip(t["request"], t.rows(), strict=True))[rid] for t in (plain, other))
            assert found.e2e == (before["finished"] - before["submitted"]) - (
                after["finished"] - after["submitted"]
            )
            first, second = (
                row["ttft_steps"] or row["finished"] - row["submitted"] for row in (before, after)
            )
            assert found.ttft == first - second
            assert found.num_tokens == after["output_tokens"] - before["output_tokens"]
            assert found.first_token == (None if before["ttft_steps"] else after["ttft_steps"])
        gains = [(found.num_tokens, found.e2e, found.ttft or 0) for found in report.helps]
        assert gains == sorted(gains, reverse=True)
        assert (report.best is None) == (gains[0] <= (0, 0, 0))


def test_candidates_of_ones_own():
    report = why(story(), "b", candidates=[{"num_blocks": 5}, {"max_num_seqs": 1, "block_size": 4}])
    assert [found.name for found in report.helps] == ["num_blocks=5", "max_num_seqs=1, block_size=4"]
    with pytest.raises(ConfigError, match="EngineConfig has no option pool"):
        why(story(), "b", candidates=[{"pool": 5}])


def test_when_nothing_would_have_helped():
    report = why(story(), "b", candidates=[{"max_num_seqs": 9}])
    assert report.sentences[-1] == "Re-simulated without a difference to it: max_num_seqs=9."
    assert report.sentences[-2] == "No single change that was tried would have helped."


def test_a_recording_begun_mid_run():
    engine = Engine(CROWDED, SimulatedRunner())
    for _ in range(4):
        engine.add_request([1] * 5, SamplingParams(max_tokens=5))
    engine.step()
    with Recorder(engine) as recording:
        for _ in range(2):
            engine.add_request([1] * 5, SamplingParams(max_tokens=5))
        while engine.has_unfinished():
            engine.step()
    report = why(recording, "r5")
    assert report.sentences[-1].startswith(
        "What would have helped cannot be re-simulated: Only a recording from"
    )
    assert report.causes
    with pytest.raises(
        UnknownRequest, match="No request 'r0' was submitted in this recording; it has r4, r5"
    ):
        why(recording, "r0")


def test_a_request_that_lives_yet_and_one_that_was_never_there():
    run = Run(SMALL)
    run.submit("a", 3, 9)
    run.step()
    run.submit("b", 3, 9)
    assert why(run.recording, "a").sentences[0] == "a is still live after 1 step: TTFT 1, 1 token produced."
    assert why(run.recording, "b").sentences[0] == "b was there for no step."
    run.scheduler.abort("b")
    assert why(run.recording, "b").sentences[0] == "b was there for no step (abort)."


def test_the_latest_of_an_id():
    run = Run(SMALL)
    run.submit("a", 3, 4)
    run.drain()
    run.submit("b", 3, 4)
    run.submit("a", 3, 4)
    run.drain()
    report = why(run.recording, "a")
    assert report.phases.steps("preempted")
    assert report.best.changes == {"num_blocks": 6}


def test_candidates_fit_the_settings():
    run = Run(EngineConfig(**(CROWDED.to_dict() | {"order": "priority", "aging": 5.0, "watermark": 0.2})))
    run.submit("a", 3, 4, priority=1)
    names = {name for changes in default_candidates(run.drain()) for name in changes}
    assert {"watermark", "victim", "chunking"} <= names
    assert "order" not in names
    assert "aging" not in names, "there is one already"
    strict = Run(EngineConfig(**(CROWDED.to_dict() | {"order": "priority"})))
    strict.submit("a", 3, 4, priority=1)
    assert {"aging": 1.0} in default_candidates(strict.drain())
    buddy = Run(EngineConfig(**(CROWDED.to_dict() | {"allocator": "buddy"})))
    buddy.submit("a", 3, 4)
    for changes in default_candidates(buddy.drain()):
        assert fork(buddy.recording, 0, **changes).is_complete


def test_a_change_that_refuses_requests_is_no_help():
    run = Run()
    run.submit("a", 12, 4)
    run.submit("b", 8, 4)
    report = why(run.drain(), "b", candidates=[{"num_blocks": 5}, {"num_blocks": 20}])
    assert [found.name for found in report.helps] == ["num_blocks=20"]


def test_a_request_that_was_given_up_before_its_first_token():
    run = Run(EngineConfig(num_blocks=40, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    run.submit("a", 2, 9)
    run.submit("b", 2, 2)
    for _ in range(5):
        run.step()
    run.scheduler.abort("b")
    report = why(run.drain(), "b")
    assert report.sentences[0] == "b ended (abort) after 5 steps: no token came, 0 tokens produced."
    assert report.best.name == "max_num_seqs=2"
    assert report.best.ttft == 4


def test_one_that_waits_behind_several():
    """Numbers and names that change on the way are not told of the whole stretch."""
    run = Run(EngineConfig(num_blocks=80, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    for rid in "abcd":
        run.submit(rid, 2, 2)
    report = why(run.drain(), "d")
    assert [(str(cause), cause.steps) for cause in report.causes] == [
        ("behind b in 2, c in 2: the only seat (max_num_seqs) is taken", [1, 2, 3, 4]),
        ("the only seat (max_num_seqs) is taken", [5, 6]),
    ]


def test_how_one_was_ended_and_what_it_would_have_got():
    run = Run(EngineConfig(num_blocks=40, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    run.submit("a", 2, 9)
    run.submit("b", 2, 8)
    for _ in range(5):
        run.step()
    run.scheduler.abort("b", "the caller hung up")
    sentences = why(run.drain(), "b", candidates=[{"max_num_seqs": 2}]).sentences
    assert sentences[-4:] == [
        "It was ended after step 5: the caller hung up.",
        "What would have helped most: max_num_seqs=2, a first token after 1 step instead of none and 5 tokens more.",
        "The price of max_num_seqs=2: more seats (max_num_seqs is 1), the others' TTFT and E2E not longer, makespan "
        "the same.",
        "Re-simulated from the first step: max_num_seqs=2 (a first token after 1 step instead of none and 5 tokens "
        "more).",
    ]


def test_one_that_outgrew_the_pool():
    """A larger pool makes it longer, and that is what it lacked."""
    run = Run(EngineConfig(num_blocks=5, block_size=2, max_num_batched_tokens=16, max_model_len=40))
    run.submit("a", 4, 30)
    run.submit("b", 2, 3)
    report = why(run.drain(), "a", candidates=[{"num_blocks": 20}])
    assert report.best.num_tokens > 0
    assert "It was ended after step 8: " in str(report)
    assert report.best.effect.endswith("tokens more")


def test_a_recording_that_ends_before_it():
    run = Run(EngineConfig(num_blocks=40, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    run.submit("a", 2, 9)
    run.submit("b", 2, 2)
    for _ in range(3):
        run.step()
    assert why(run.recording, "b").sentences[4] == (
        "The recording ends before it does. Re-simulated, everybody runs on to the most tokens asked for; without a "
        "change it then has TTFT 10 and E2E 11, from which gains count."
    )


def long_prompt(steps=40):
    """r2's prompt fills the budget for five steps, and r3 waits behind it."""
    run = Run(EngineConfig(num_blocks=80, block_size=4, max_num_batched_tokens=24, max_model_len=200))
    run.submit("r0", 4, 12)
    run.submit("r1", 4, 12)
    for _ in range(4):
        run.step()
    run.submit("r2", 110, 4)
    run.submit("r3", 6, 4)
    for _ in range(steps):
        if run.scheduler.requests:
            run.step()
    return run.recording


def test_who_used_the_budget_up_and_that_chunks_can_be_capped():
    report = why(long_prompt(), "r3")
    assert report.sentences[2] == (
        "It waited 5 steps, steps 5 to 9: token budget of 24 used up (r2: 22 tokens a step in steps 5 to 9; 2 more)."
    )
    assert {"max_chunk_tokens": 12} in [found.changes for found in report.helps if found.e2e == 5]
    capped = why(long_prompt(), "r3", candidates=[{"max_num_batched_tokens": 64}, {"max_chunk_tokens": 12}])
    assert capped.sentences[4:6] == [
        "What would have helped most: max_chunk_tokens=12, TTFT 5 steps shorter and E2E 5 steps shorter.",
        "The price of max_chunk_tokens=12: the others' TTFT at worst 5 steps longer (r2), E2E at worst 5 steps "
        "longer (r2), makespan 4 steps longer.",
    ]
    assert not any("max_chunk_tokens" in changes for changes in default_candidates(story())), (
        "nothing was full"
    )


def test_many_small_ones_use_a_budget_up():
    run = Run(EngineConfig(num_blocks=80, block_size=4, max_num_batched_tokens=5, max_num_seqs=9))
    for number in range(5):
        run.submit(f"r{number}", 1, 6)
    run.step()
    run.submit("late", 1, 1)
    assert [str(cause) for cause in why(run.drain(), "late").causes] == [
        "token budget of 5 used up (5 requests, 1 token a step each)"
    ]


def test_a_change_that_costs_no_hardware_comes_first():
    recording, free = long_prompt(), {"order": "shortest-prefill"}
    best = "What would have helped most: order=shortest-prefill, TTFT 5 steps shorter and E2E 5 steps shorter"
    report = why(recording, "r3", candidates=[{"max_num_batched_tokens": 256, "num_blocks": 90}, free])
    assert report.helps[0].grows == {"num_blocks": 80, "max_num_batched_tokens": 24}
    assert report.sentences[4] == (
        f"{best}; max_num_batched_tokens=256, num_blocks=90 helps as much, but costs more memory and longer steps."
    )
    worse = why(story(), "b", candidates=[{"num_blocks": 6}, {"max_num_seqs": 9}])
    assert worse.sentences[7] == "What would have helped most: num_blocks=6, E2E 2 steps shorter."


@pytest.mark.parametrize(
    ("most", "free", "chosen"),
    [((40, 40), (38, 38), 1), ((40, 40), (37, 40), 0), ((3, 2), (2, 1), 1), ((1, 1), (0, 0), 0), ((9, 4), (9, 3), 1)],
)  # fmt: skip
def test_within_a_step_or_5_percent_is_as_much(most, free, chosen):
    helps = [Help({"num_blocks": 9}, *most, grows={"num_blocks": 8}), Help({"order": "sjf"}, *free)]
    assert best_of(helps)[0] is helps[chosen]


@pytest.mark.parametrize("seed", range(6))
def test_the_price_beside_forks_by_hand(seed):
    recording = random_run(seed)
    ids = recording.requests["request"]
    for rid in ids[::3]:
        report = why(
            recording,
            rid,
            candidates=[{"num_blocks": 60}, {"order": "shortest-prefill"}, {"max_num_seqs": 1}],
        )
        if report.best is None:
            assert report.price is None
            continue
        runs = [fork(recording, 0, **changes).recording.requests for changes in ({}, report.best.changes)]
        before, after = (dict(zip(run["request"], run.rows(), strict=True)) for run in runs)
        price, others = report.price, [other for other in ids if other != rid]
        assert price.makespan == max(runs[1]["finished"]) - max(runs[0]["finished"])
        lost = {other for other in others if after[other]["output_tokens"] < before[other]["output_tokens"]}
        assert set(price.shorted) == lost
        for name, wait in (
            ("TTFT", lambda row: row["ttft_steps"] or row["finished"] - row["submitted"]),
            ("E2E", lambda row: row["finished"] - row["submitted"]),
        ):
            more = {other: wait(after[other]) - wait(before[other]) for other in others}
            who, worst = price.worst.get(name, (None, 0))
            assert worst == max(0, *more.values())
            assert who is None or more[who] == worst


def test_a_run_that_has_not_ended_is_a_projection():
    waits = why(long_prompt(2), "r3")
    assert waits.sentences[5].startswith("What would have helped most, projected to the run's end: order=")
    assert waits.sentences[6].startswith("The price of order=shortest-prefill: the others'")
    run = Run(EngineConfig(num_blocks=40, block_size=2, max_num_batched_tokens=16, max_num_seqs=1))
    run.submit("a", 2, 3)
    run.submit("b", 2, 2)
    run.submit("c", 2, 9)
    for _ in range(6):
        run.step()
    over = why(run.recording, "b", candidates=[{"max_num_seqs": 2}])
    assert over.sentences[4].startswith("What would have helped most: max_num_seqs=2, TTFT 3")
    assert over.sentences[5].startswith("The price of max_num_seqs=2, projected to the run's end: more seats")


def test_a_report_fits_on_a_screen():
    """However often something happened to it."""
    report = why(story(), "b")
    report.preempted = [(step, "no room") for step in range(1, 9)]
    report.preempted_for_it = [(step, "x", "no room") for step in (1, 1, 2, 3, 3)]
    report.evicted_for_it = [(step, (1,) * step, "b needs it") for step in range(1, 7)]
    report.causes = [Cause(str(n), str(n), [n]) for n in range(9)]
    said = report.sentences
    assert said[2:7] == [*(f"It waited 1 step, step {n}: {n}." for n in range(4)), (
        "It waited 5 steps more for other reasons, steps 4 to 8."
    )]  # fmt: skip
    assert "It was preempted 5 times more, steps 4 to 8." in said
    assert "Somebody was preempted for it 2 times more, step 3." in said
    assert "1 cached block was evicted for it, step 1: b needs it." in said
    assert "2 cached blocks were evicted for it, step 2: b needs it." in said
    assert "Cached blocks were evicted for it 3 times more, steps 4 to 6." in said
    assert len(said) < 30
    report.preempted = [(step, "no room") for step in (1, 2, 3, 5)]
    assert "It was preempted, step 5: no room." in report.sentences
    report.preempted = []
    report.causes = [Cause("full", "full", [1, 3, 5, 7, 9]), Cause("late", "late", [1, 3, 5, 7, 9, 11])]
    assert report.sentences[2:4] == [
        "It waited 5 steps, steps 1, 3, 5, 7 and 1 more stretch: full.",
        "It waited 6 steps, steps 1, 3, 5, 7 and 2 more stretches: late.",
    ]


def test_ids_that_have_no_report_say_why():
    engine = Engine(CROWDED, SimulatedRunner())
    with Recorder(engine) as recording:
        engine.add_request([1] * 3, SamplingParams(max_tokens=2, n=2), "two")
        with pytest.raises(RequestTooLong):
            engine.add_request([1] * 50, SamplingParams(max_tokens=2), "long")
        while engine.has_unfinished():
            engine.step()
    with pytest.raises(UnknownRequest, match=r"'two' has several outputs.*ask about one: two\.0, two\.1\."):
        why(recording, "two")
    with pytest.raises(
        UnknownRequest, match="'long' was refused when it came, after step 0: Request 'long' has 50"
    ):
        why(recording, "long")
    assert why(recording, "two.1").sentences[0].startswith("two.1 ended (length) after ")


def test_a_recording_of_another_engine():
    """Phases and causes as far as they are known, its times as the requests' table has them, and no re-simulation."""
    recording = from_vllm([_span("a", 1.0, 4.0, 0.0), _span("b", 1.5, 6.0, 2.0)])
    report = why(recording, "b")
    assert report.phases.counts["queue"]
    first, end = recording.requests["ttft_s"][-1], report.life.seconds.e2e
    clock, note = report.sentences[-2:]
    assert clock.startswith("By its recording's clock: queue time ")
    assert clock.endswith(f" s, TTFT {first:.3g} s, E2E {end:.3g} s.")
    assert note.startswith(
        "What would have helped cannot be re-simulated: This recording is of another engine"
    )


def _span(rid, start, end, queued):
    times = {"start_time": f"2026-01-02T03:04:0{start}Z", "end_time": f"2026-01-02T03:04:0{end}Z"}
    attributes = {
        "gen_ai.request.id": rid, "gen_ai.usage.prompt_tokens": 32, "gen_ai.usage.completion_tokens": 9,
        "gen_ai.latency.time_in_queue": queued, "gen_ai.latency.time_to_first_token": queued + 0.25,
        "gen_ai.latency.e2e": end - start,
    }  # fmt: skip
    return json.dumps({"name": "llm_request", **times, "attributes": attributes})


def test_an_interrupted_report_leaves_nothing_behind(monkeypatch):
    recording = story()
    before, told = recording.to_jsonl(), str(why(recording, "b"))
    monkeypatch.setattr(Player, "never_fit", lambda player: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        why(recording, "b")
    monkeypatch.undo()
    assert recording.to_jsonl() == before
    assert str(why(recording, "b")) == told
