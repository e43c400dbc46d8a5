"""Several outputs of one prompt: children that the scheduler sees as requests, one output that the caller sees."""

import asyncio
from collections import deque

import pytest

from pagedinfer import Recorder, SamplingParams
from pagedinfer.async_engine import AsyncEngine
from pagedinfer.errors import ConfigError, DuplicateRequest, EngineClosed, RequestTooLong, UnknownRequest
from pagedinfer.sim.rerun import rerun
from pagedinfer.testing import assert_no_leak, cold_outputs, force_preempt, run_bounded, tiny_llm
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm():
    with tiny_llm(num_blocks=128) as llm:
        yield llm
        llm.engine.check()


def warm(**options):
    return SamplingParams(**({"temperature": 1.5, "seed": 7, "max_tokens": 10, "ignore_eos": True} | options))


def texts(output):
    return [completion.text for completion in output.outputs]


def test_n_outputs_in_order_and_all_different(llm):
    (output,) = llm.generate("Hello", warm(n=4))
    assert output.request_id == "r0"
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len(set(texts(output))) == 4
    assert output.finished
    assert all(completion.finish_reason == "length" for completion in output.outputs)
    assert output.prompt_token_ids == [256, *b"Hello"]  # once
    assert output.detail == "10 tokens produced"
    assert_no_leak(llm.engine)


def test_the_first_child_is_the_output_of_n_1_and_more_children_change_none(llm):
    one, three, five = (llm.generate("Hello", warm(n=n))[0] for n in (1, 3, 5))
    assert texts(one) == texts(three)[:1]
    assert texts(three) == texts(five)[:3]
    assert texts(one) == texts(cold_outputs(["Hello"], warm())[0])


@pytest.mark.parametrize(
    ("prompt_tokens", "shared", "copies"),
    [(2, 1, 3), (13, 2, 3), (16, 2, 3), (17, 2, 0), (1, 0, 0)],  # blocks of 8
)
def test_children_share_the_prompt_and_copy_what_they_write_to(prompt_tokens, shared, copies):
    with tiny_llm(num_blocks=128, block_size=8) as llm:
        with Recorder(llm.engine) as recording:
            llm.engine.add_request({"prompt_token_ids": list(range(1, prompt_tokens + 1))}, warm(n=4))
            run_bounded(llm.engine, 100)
        shares = [event for event in recording.events if event.kind == "share"]
        assert [len(event.pblks) for event in shares] == [shared] * len(shares)
        assert len(shares) == (3 if shared else 0)
        assert sum(len(event.pairs) for event in recording.events if event.kind == "copy") == copies
        assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)
        assert_no_leak(llm.engine)


def test_without_a_seed_children_and_later_requests_have_their_own(llm):
    free = warm(seed=None)
    plain = llm.generate(["a", "b"], free)
    with tiny_llm(num_blocks=128) as other:
        many = other.generate(["a", "b"], [warm(seed=None, n=3), free])
    assert texts(many[0])[0] == texts(plain[0])[0]
    assert texts(many[1]) == texts(plain[1])  # the children have not shifted its seed
    assert len(set(texts(many[0]))) == 3


def test_a_seed_of_a_child_is_no_neighbours_seed():
    from pagedinfer.engine.group import child_seed
    from pagedinfer.randomness import mix

    seeds = [child_seed(base, index) for base in range(50) for index in range(50)]
    seeds += [mix(base, number) for base in range(50) for number in range(50)]
    assert len(set(seeds)) == len(seeds)
    assert child_seed(5, 0) == 5


@pytest.mark.parametrize(
    "options", [{"max_num_seqs": 1}, {"max_num_batched_tokens": 3}, {"num_blocks": 12}], ids=str
)
def test_a_tight_engine_gives_the_same(llm, options):
    params = [warm(n=3), warm(n=2, seed=8), warm()]
    expected = llm.generate(["Hello", "you", "there"], params)
    with tiny_llm(**options) as tight:
        outputs = tight.generate(["Hello", "you", "there"], params)
        assert [texts(output) for output in outputs] == [texts(output) for output in expected]
        assert_no_leak(tight.engine)


def test_preempted_children_go_on_where_they_were(llm):
    (expected,) = llm.generate("Hello", warm(n=3))
    rid = llm.engine.add_request("Hello", warm(n=3))
    llm.engine.step()  # the first child computes the prompt, the others wait for it
    for step in range(6):
        llm.engine.step()
        force_preempt(llm.engine, f"{rid}.{step % 3}")
        llm.engine.check()
    assert texts(run_bounded(llm.engine, 100)[rid]) == texts(expected)


def test_one_output_per_step_and_texts_that_only_grow(llm):
    rid = llm.engine.add_request("Hello", warm(n=3, stop=["zz"]))
    before = [""] * 3
    while llm.engine.has_unfinished():
        outputs = llm.engine.step()
        assert [output.request_id for output in outputs] == [rid]
        now = texts(outputs[0])
        assert all(new.startswith(old) for new, old in zip(now, before, strict=True))
        before = now
    assert outputs[0].finished
    assert all(before)


def test_children_that_end_early_wait_for_the_others(llm):
    params = warm(n=6, max_tokens=40, ignore_eos=False, temperature=3.0)
    rid = llm.engine.add_request("Hello", params)
    seen = []
    while llm.engine.has_unfinished():
        (output,) = llm.engine.step()
        llm.engine.check()
        seen.append([c.finish_reason for c in output.outputs])
        assert output.finished == (None not in seen[-1])
    assert any(set(reasons) > {None} for reasons in seen), (
        "no child ended before another: choose another seed"
    )
    assert llm.engine.metrics()["num_finished"] == 6
    assert not llm.engine.is_live(rid)


# -- ids and ends -----------------------------------------------------------------------------------------------------


def test_an_abort_ends_all(llm):
    rid = llm.engine.add_request("Hello", warm(n=3))
    with pytest.raises(UnknownRequest, match=r"several outputs.*r0\.0, r0\.1, r0\.2"):
        llm.engine.request(rid)
    assert llm.engine.request("r0.2").num_prompt_tokens == 6
    llm.engine.add_request("x", warm(), request_id="other")
    for _ in range(2):
        llm.engine.step()
    output = llm.engine.abort(rid)
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert [len(c.token_ids) for c in output.outputs] == [2, 1, 1]  # the first computed their prompt alone
    with pytest.raises(UnknownRequest):
        llm.engine.abort(rid)
    llm.engine.check()
    assert set(run_bounded(llm.engine, 50)) == {"other"}


def test_one_child_may_be_aborted(llm):
    (expected,) = llm.generate("Hello", warm(n=3))
    rid = llm.engine.add_request("Hello", warm(n=3))
    llm.engine.step()
    output = llm.engine.abort(f"{rid}.1")
    assert not output.finished
    assert [c.finish_reason for c in output.outputs] == [None, "abort", None]
    done = run_bounded(llm.engine, 50)[rid]
    assert [c.finish_reason for c in done.outputs] == ["length", "abort", "length"]
    assert texts(done)[::2] == texts(expected)[::2]


@pytest.mark.parametrize("kind", ["submit", "step", "alloc", "commit", "finish", "free"])
@pytest.mark.parametrize("victim", ["r0", "r0.1"])
def test_a_subscriber_may_abort_at_any_event(llm, kind, victim):
    aborted = []

    def subscriber(event):
        if (
            event.kind == kind
            and not aborted
            and (event.step > 1 or kind == "submit")
            and llm.engine.is_live(victim)
        ):
            aborted.append(victim)
            aborted.append(llm.engine.abort(victim))

    outputs = []
    with Recorder(llm.engine) as recording, llm.engine.bus.subscribe(subscriber):
        rid = llm.engine.add_request("Hello", warm(n=2))
        while llm.engine.has_unfinished():
            outputs += llm.engine.step()
            llm.engine.check()
    assert rid == "r0"
    if not aborted:  # both end in one step, and its events come when they have
        assert (victim, kind) in {("r0.1", "finish"), ("r0.1", "free")}
        return
    last = ([o for o in (*outputs, aborted[1]) if o and o.finished])[-1]
    assert {c.finish_reason for c in last.outputs} <= {"abort", "length"}
    assert sum(output.finished for output in outputs) + bool(aborted[1] and aborted[1].finished) == 1
    assert fold(recording.events).snapshot() == llm.engine.snapshot()
    assert_no_leak(llm.engine)


def test_ids_never_collide(llm):
    engine = llm.engine
    engine.add_request("a", warm(n=2), request_id="a")
    for taken in ("a", "a.0", "a.1"):
        with pytest.raises(DuplicateRequest, match=f"'{taken}'"):
            engine.add_request("b", request_id=taken)
    engine.add_request("c", request_id="c.1")
    with pytest.raises(DuplicateRequest, match="'c' needs this id"):
        engine.add_request("c", warm(n=2), request_id="c")
    with pytest.raises(
        DuplicateRequest, match=r"'c\.1' is still live"
    ):  # the id of a request with one output
        engine.add_request("c", warm(n=2), request_id="c.1")
    engine.check()
    assert engine.add_request("d", warm(n=2)) == "r2"
    assert set(run_bounded(engine, 50)) == {"a", "c.1", "r2"}
    engine.add_request("a", warm(), request_id="a")
    assert set(run_bounded(engine, 50)) == {"a"}


def test_a_prompt_that_cannot_be_served_leaves_no_child(llm):
    with pytest.raises(RequestTooLong):
        llm.generate([1] * 3000, warm(n=3))
    assert_no_leak(llm.engine)
    outputs = llm.generate(["a", [1] * 3000, "b"], warm(n=2))
    assert [output.error is None for output in outputs] == [True, False, True]
    assert len(outputs[2].outputs) == 2


def test_a_child_that_fails_costs_only_itself(llm):
    class Failing:
        calls = 0

        def allowed(self, token_ids):
            self.calls += 1
            if self.calls == 5:
                raise RuntimeError("once")
            return [True] * 259

    (output,) = llm.generate("Hello", warm(n=3, token_mask=Failing()))
    (expected,) = llm.generate("Hello", warm(n=3))
    assert [c.finish_reason for c in output.outputs] == ["length", "error", "length"]
    assert "once" in output.error
    assert texts(output)[::2] == texts(expected)[::2]


def test_an_outbox_and_close(llm):
    with tiny_llm() as other:
        box = deque()
        other.engine.add_request("a", warm(n=2), outbox=box)
        assert other.engine.step() == []
        other.engine.close()
        assert [output.finished for output in box] == [False, True]
        assert [c.finish_reason for c in box[-1].outputs] == ["abort"] * 2
        with pytest.raises(EngineClosed):
            other.engine.add_request("a", warm(n=2))


def test_an_interrupted_submission_leaves_no_child(llm):
    import signal

    def subscriber(event):
        if event.kind == "submit" and event.rid == "r0.1":
            signal.raise_signal(signal.SIGINT)

    with llm.engine.bus.subscribe(subscriber), pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], warm(n=3))
    assert_no_leak(llm.engine)


def test_for_the_core_children_are_ordinary_requests(llm):
    with Recorder(llm.engine) as recording:
        llm.generate(["Hello", "x"], [warm(n=3), warm()])
    assert [event.rid for event in recording.events if event.kind == "submit"] == [
        "r0.0",
        "r0.1",
        "r0.2",
        "r1",
    ]
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_streams_carry_all_outputs(llm):
    (expected,) = llm.generate("Hello", warm(n=3))
    running = AsyncEngine(llm.engine)

    async def both():
        seen = [texts(output) async for output in running.stream("Hello", warm(n=3))]
        stream = running.stream("Hello", warm(n=3))
        await anext(stream)
        await stream.aclose()
        return seen

    seen = asyncio.run(asyncio.wait_for(both(), 60))
    assert seen[-1] == texts(expected)
    assert all(len(row) == 3 for row in seen)
    with pytest.raises(ConfigError, match=r"n=3.*use generate"):
        next(llm.stream("Hello", warm(n=3)))


def test_the_prompt_is_scored_once(llm):
    execute, scored = llm.engine.runner.execute, []

    def watched(plan):
        result = execute(plan)
        scored.extend(result.prompt_logprobs)
        return result

    llm.engine.runner.execute = watched
    (output,) = llm.generate("Hello", warm(n=3, prompt_logprobs=1))
    assert scored == ["r0.0"]
    (one,) = llm.generate("Hello", warm(prompt_logprobs=1))
    assert output.prompt_logprobs == one.prompt_logprobs
    assert len(output.prompt_logprobs) == 6


# -- best_of ----------------------------------------------------------------------------------------------------------


def test_best_of_returns_the_likeliest_first(llm):
    (all_of_them,) = llm.generate("Hello", warm(n=6, logprobs=0))
    ranked = sorted(all_of_them.outputs, key=lambda c: -c.cumulative_logprob)
    for n in (1, 2, 6):
        (best,) = llm.generate("Hello", warm(n=n, best_of=6))
        expected = ranked[:n] if n < 6 else all_of_them.outputs
        assert texts(best) == [completion.text for completion in expected]
        assert [completion.index for completion in best.outputs] == list(range(n))
        assert all(completion.logprobs is None for completion in best.outputs)
    assert ranked[0].text != all_of_them.outputs[0].text, "the first is the best: choose another seed"
    (with_logprobs,) = llm.generate("Hello", warm(n=1, best_of=6, logprobs=2))
    assert len(with_logprobs.outputs[0].logprobs) == 10
    assert with_logprobs.outputs[0].cumulative_logprob == pytest.approx(
        ranked[0].cumulative_logprob, abs=1e-4
    )


def test_what_cannot_be_is_refused():
    for options, words in (
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True"),
        ({"n": 2.0}, "n=2.0"),
        ({"n": 3, "best_of": 2}, "best_of=2 is below n=3"),
        ({"n": 2, "temperature": 0.0}, "n=2.*temperature=0 gives equal outputs"),
        ({"best_of": 2, "temperature": 0.0}, "best_of=2.*temperature=0"),
    ):
        with pytest.raises(ConfigError, match=words):
            SamplingParams(**options)
    SamplingParams(n=1, best_of=1, temperature=0.0)


def test_the_prompt_of_several_outputs_is_counted_once():
    with tiny_llm() as llm:
        params = SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3, 4, 5]], params)
        now = llm.engine.metrics()
        assert now["num_requests"] == 1
        assert now["num_prompt_tokens"] == len(output.prompt_token_ids) == 5
        assert now["num_output_tokens"] == sum(len(o.token_ids) for o in output.outputs) == 12
        assert now["num_submitted"] == 3
