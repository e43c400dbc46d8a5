"""Several requests on the same blocks: reference counts, and a copy before a write. Stories with literal block ids.

Blocks hold 4 tokens. The shadow notices a forgotten copy, as the planted faults show.
"""

import random
from collections import deque

import pytest
from stories import A, B, Story, story

from pagedinfer import Recorder, SamplingParams
from pagedinfer.errors import ConfigError, DuplicateRequest, QueueFull, RequestError, UnknownRequest
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.ops import BlockOp
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowFault
from pagedinfer.testing import (
    assert_no_leak,
    check_map,
    cold_outputs,
    force_preempt,
    refuse_allocation,
    run_bounded,
    tiny_llm,
)
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")

__all__ = ["story"]  # the fixture


def copies(s):
    return [(e.rid, e.first, *e.pairs) for e in s.told("copy")]


def num_computed(s):
    return sum(sum(e.scheduled.values()) for e in s.told("step"))


# -- n outputs of one prompt ------------------------------------------------------------------------------------------


def test_children_share_the_prompt_and_copy_its_partly_filled_last_block(story):
    s = story(16)
    s.add(A[:10], n=3, max_tokens=4)
    s.step()
    assert s.table("r0.0") == [0, 1, 2]
    assert s.told("step")[-1].reasons == {
        f"r0.{child}": "waits for r0.0, which computes their prompt" for child in (1, 2)
    }
    s.step()
    assert [s.table(f"r0.{child}") for child in range(3)] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert s.refs == {0: 3, 1: 3, 2: 1, 3: 1, 4: 1}
    assert copies(s) == [("r0.1", 2, (2, 3)), ("r0.2", 2, (2, 4))]
    assert s.told("step")[-1].scheduled == {"r0.0": 1, "r0.1": 1, "r0.2": 1}
    assert [s.engine.request(f"r0.{child}").cache_note for child in (1, 2)] == [
        "shares the prompt of r0.0"
    ] * 2
    s.step(2)  # the first has all its tokens, the others lack one
    assert s.table("r0.0") is None
    assert s.refs == {0: 2, 1: 2, 3: 1, 4: 1}
    s.run()
    assert (
        num_computed(s) == 10 + 2 + 3 * 3
    )  # the prompt once, its last token for each child, three outputs each
    assert s.runner._tokens.num_moved == {"copy": 2}


def test_children_copy_a_full_last_block_too_because_its_last_token_is_computed(story):
    s = story(16)
    s.add(A[:8], n=3, max_tokens=3)
    s.step(2)
    assert [s.table(f"r0.{child}") for child in range(3)] == [[0, 1, 2], [0, 3], [0, 4]]
    assert s.refs == {0: 3, 1: 1, 2: 1, 3: 1, 4: 1}
    assert copies(s) == [("r0.1", 1, (1, 3)), ("r0.2", 1, (1, 4))]
    s.step()
    assert [s.table(f"r0.{child}") for child in (1, 2)] == [[0, 3, 5], [0, 4, 6]]
    s.run()
    assert s.cached == [0, 1]  # the copies are twins: they stay private
    assert num_computed(s) == 8 + 2 + 3 * 2


def test_a_long_prompt_is_computed_in_chunks_once(story):
    s = story(32, max_num_batched_tokens=6)
    s.add(A[:25], n=4, max_tokens=2)
    s.run()
    assert num_computed(s) == 25 + 3 + 4
    assert len(s.told("copy")) == 0  # 24 tokens are six full blocks; the last token begins a block of its own
    assert [(e.rid, e.pblks) for e in s.told("share")] == [
        (f"r0.{child}", (0, 1, 2, 3, 4, 5)) for child in (1, 2, 3)
    ]


@pytest.mark.parametrize("length", [1, 2, 4, 5])
def test_short_prompts(story, length):
    s = story(16)
    s.add(A[:length], n=3, max_tokens=6)
    s.step(2)
    assert len(s.engine.scheduler.running) == 3  # a prompt of one token is nothing to wait for
    s.run()
    assert num_computed(s) == (3 if length == 1 else length + 2) + 3 * 5


def test_without_the_cache_children_share_all_the_same(story):
    s = story(16, enable_prefix_caching=False)
    s.add(A[:10], n=3, max_tokens=4)
    s.run()
    assert num_computed(s) == 10 + 2 + 3 * 3
    assert s.cached == []


def test_a_parent_that_ends_at_once_leaves_its_blocks_in_the_cache(story):
    s = story(16)
    s.add(A[:10], n=3, max_tokens=1)
    s.step()
    assert s.table("r0.0") is None
    s.step()
    assert [(e.rid, e.n) for e in s.told("hit")] == [("r0.0", 0), ("r0.1", 8), ("r0.2", 8)]
    assert num_computed(s) == 10 + 2 + 2


def test_a_parent_that_is_preempted_is_waited_for(story):
    s = story(16, max_num_batched_tokens=6)
    s.add(A[:10], n=2, max_tokens=4)
    s.step()
    force_preempt(s.engine, "r0.0")
    s.step()  # the full block of the 6 tokens written is found; the other 6 are computed
    assert (s.table("r0.0"), s.table("r0.1")) == ([0, 2, 3], None)
    assert s.told("step")[-1].reasons["r0.1"] == "waits for r0.0, which computes their prompt"
    s.step()
    assert s.refs[0] == 2
    s.run()


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_a_parent_that_is_aborted_leaves_the_others(story, when):
    s = story(16)
    s.add(A[:10], n=3, max_tokens=5)
    s.step(when) if when else None
    s.engine.abort("r0.0")
    s.check()
    (output,) = s.run().values()
    assert [c.finish_reason for c in output.outputs] == ["abort", "length", "length"]
    computed = {0: 10 + 10, 1: 10 + 2 + 2, 2: 10 + 2 + 1, 3: 10 + 2 + 2}[
        when
    ]  # two tokens are in no full block
    assert num_computed(s) == computed + 2 * 4


def test_a_child_that_goes_frees_what_it_alone_holds(story):
    s = story(16)
    s.add(A[:10], n=3, max_tokens=9)
    s.step(2)
    force_preempt(s.engine, "r0.1")
    s.check()
    assert s.refs == {0: 2, 1: 2, 2: 1, 4: 1}
    s.engine.abort("r0.2")
    s.check()
    assert s.refs == {0: 1, 1: 1, 2: 1}
    s.step()
    assert s.told("hit")[-1].n == 8  # the preempted one is back on the shared blocks
    assert s.table("r0.1")[:2] == [0, 1]


def test_a_child_is_swapped_out_with_copies_of_what_it_shares(story):
    s = story(16, num_host_blocks=8, preempt_mode="swap")
    s.add(A[:10], n=2, max_tokens=9)
    s.step(2)
    s.engine.scheduler.preempt("r0.1", "told to", "swap")
    s.check()
    assert s.refs == {0: 1, 1: 1, 2: 1}
    assert s.told("swap")[-1].pairs == ((0, 0), (1, 1), (3, 2))
    s.run()
    assert [e.dir for e in s.told("swap")] == ["out", "in"]


def test_children_wait_for_room_for_their_copies(story):
    s = story(5)
    s.add(A[:10], n=3, max_tokens=3)
    s.step(2)
    assert s.table("r0.1") == [0, 1, 3]
    assert s.told("step")[-1].reasons == {"r0.2": "needs 2 blocks beside shared ones, 1 free"}
    s.run()


@pytest.mark.parametrize("call", range(8))
def test_a_refused_copy_changes_nothing_but_the_step(call):
    s = Story(16)
    s.add(A[:10], n=3, max_tokens=8)
    refuse_allocation(s.engine, at=call)
    s.close()
    assert len(s.told("refuse")) == 1


def test_a_cancelled_plan_takes_copies_back(story):
    s = story(16)
    s.add(A[:10], n=3, max_tokens=4)
    s.step()
    before = s.engine.snapshot()
    scheduler = s.engine.scheduler
    plan = scheduler.schedule(scheduler.step)
    assert [op.kind for op in plan.ops] == ["copy", "copy"]
    s.runner.execute(plan)
    s.runner.take_back(plan)
    scheduler.cancel(plan)
    assert s.engine.snapshot() == before
    s.check()
    s.run()


def test_the_outputs_are_those_of_requests_of_their_own():
    params = SamplingParams(n=3, temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    for prompt in (A[:10], A[:8], A[:3]):
        with tiny_llm(num_blocks=9, max_num_batched_tokens=7) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            check_map(llm.engine)
            assert llm.engine.metrics()["num_preemptions"] or len(prompt) == 3
        (cold,) = cold_outputs([prompt], params, enable_prefix_caching=False, max_num_seqs=1)
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in cold.outputs]


# -- planted faults ---------------------------------------------------------------------------------------------------


def no_copy_at_all(monkeypatch):
    monkeypatch.setattr(BlockManager, "_shared_at", lambda self, rid, start: ())


def a_table_without_its_copy(monkeypatch):
    take = BlockManager.take_ops
    monkeypatch.setattr(BlockManager, "take_ops", lambda self: [op for op in take(self) if op.kind != "copy"])


def a_copy_the_wrong_way(monkeypatch):
    take = BlockManager.take_ops

    def turned(self):
        return [BlockOp(op.kind, tuple((to, source) for source, to in op.pairs)) for op in take(self)]

    monkeypatch.setattr(BlockManager, "take_ops", turned)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (no_copy_at_all, "block 2, which holds token|are both written to slot"),
        (a_table_without_its_copy, "block 3, which holds nothing"),
        (a_copy_the_wrong_way, "block 2, which holds nothing"),
    ],
)
@pytest.mark.parametrize("length", [10, 11])
def test_a_forgotten_copy_is_noticed(monkeypatch, plant, words, length):
    plant(monkeypatch)
    s = Story(16)
    s.add(A[:length], n=3, max_tokens=4)
    s.engine.step()
    with pytest.raises(ShadowFault, match=words):
        s.engine.step()


# -- Engine.fork ------------------------------------------------------------------------------------------------------


def test_a_fork_shares_all_and_each_copies_when_it_writes(story):
    s = story(16)
    s.add(A[:10], "a", max_tokens=8)
    s.step(2)  # 11 tokens are written, one more is known
    assert s.engine.fork("a", "b") == "b"
    s.check()
    assert s.table("b") == [0, 1, 2]
    assert s.refs == {0: 2, 1: 2, 2: 2}
    assert s.engine.request("b").token_ids == s.engine.request("a").token_ids
    s.step()
    assert copies(s) == [("a", 2, (2, 3))]  # the first to write copies, the other is alone then
    assert (s.table("a"), s.table("b")) == ([0, 1, 3], [0, 1, 2])
    done = s.run()
    assert num_computed(s) == 10 + 1 + 2 * 6
    assert done["b"].prompt_token_ids == A[:10]
    assert [len(done[rid].outputs[0].token_ids) for rid in "ab"] == [8, 8]
    assert done["b"].num_cached_tokens == 0
    assert done["b"].cache_note == "a copy of a"


def test_a_fork_at_a_block_edge_copies_nothing(story):
    s = story(16)
    s.add(A[:7], "a", max_tokens=6)
    s.step(2)  # 8 tokens are written
    s.engine.fork("a", "b")
    s.step()
    assert s.told("copy") == []
    assert (s.table("a"), s.table("b")) == ([0, 1, 2], [0, 1, 3])
    s.run()


def test_a_fork_of_what_waits_waits(story):
    s = story(16, max_num_seqs=1)
    s.add(A[:7], "a", max_tokens=3)
    assert s.engine.fork("a") == "r1"
    s.check()
    s.step()
    s.engine.fork("a", "c")  # it runs, and has the only seat
    s.check()
    assert s.engine.snapshot()["waiting"] == ["r1", "c"]
    done = s.run()
    assert set(done) == {"a", "r1", "c"}
    assert [len(o.outputs[0].token_ids) for o in done.values()] == [3, 3, 3]
    assert done["c"].outputs[0].token_ids[:1] == done["a"].outputs[0].token_ids[:1]


def test_a_fork_of_a_fork_of_a_child(story):
    s = story(16)
    s.add(A[:10], n=2, max_tokens=8)
    s.step(3)
    s.engine.fork("r0.1", "b")
    s.engine.fork("b", "c")
    s.check()
    assert s.refs[0] == 4
    s.engine.abort("r0.1")
    s.check()
    assert s.refs[0] == 3
    done = s.run()
    assert set(done) == {"r0", "b", "c"}


def test_another_last_token(story):
    s = story(16)
    s.add(A[:10], "a", max_tokens=6)
    s.step(3)
    known = s.engine.request("a").token_ids
    s.engine.fork("a", "b", last_token_id=77)
    assert s.engine.request("b").token_ids == [*known[:-1], 77]
    s.step()
    done = s.run()
    assert done["b"].outputs[0].token_ids[:3] == [*known[10:12], 77]
    assert done["a"].outputs[0].token_ids[:3] == known[10:13]


def test_a_fork_that_completes_a_block_with_another_token_has_another_key(story):
    s = story(16)
    s.add(A[:7], "a", max_tokens=9)
    s.step()  # 7 are written; the eighth is known and completes a block
    s.engine.fork("a", "b", last_token_id=77)
    s.step()
    assert s.cached == sorted({*s.table("a"), *s.table("b")})
    a, b = (s.engine.request(rid).token_ids[:8] for rid in "ab")
    s.run()
    assert s.hit([*a, 1]) == s.hit([*b, 1]) == 8
    assert s.hit([*a[:7], 78, 1]) == 4


def test_what_cannot_be_forked_is_refused(story):
    s = story(16, max_num_waiting=2, max_num_seqs=2)
    s.add(A[:10], n=2, max_tokens=4)
    with pytest.raises(UnknownRequest, match="No live request 'x'"):
        s.engine.fork("x")
    with pytest.raises(UnknownRequest, match=r"has several outputs, each a request: r0\.0, r0\.1"):
        s.engine.fork("r0")
    with pytest.raises(QueueFull):
        s.engine.fork("r0.0")
    s.step(2)
    with pytest.raises(DuplicateRequest):
        s.engine.fork("r0.0", "r0")
    for token, words in ((True, "True"), (256, "256"), (-1, "-1"), ("a", "'a'")):
        with pytest.raises(RequestError, match=rf"last_token_id={words}: ids are integers from 0 to 255"):
            s.engine.fork("r0.0", last_token_id=token)
    with pytest.raises(ConfigError):
        s.engine.fork("r0.0", 5)
    refused = []

    def inside(event):
        if event.kind == "step":
            try:
                s.engine.fork("r0.0")
            except RequestError as error:
                refused.append(str(error))

    with s.engine.bus.subscribe(inside):
        s.engine.step()
    assert refused == ["Request 'r0.0' cannot be forked while a step is open."]
    s.check()
    s.run()
    s.add(A[:5], "new")
    with pytest.raises(RequestError, match="copies a prompt alone"):
        s.engine.fork("new", last_token_id=3)


@pytest.mark.parametrize("allocator", ["first-fit", "buddy"])
def test_contiguous_memory_cannot_share_so_a_fork_computes_again(allocator):
    with tiny_llm(num_blocks=64, allocator=allocator) as llm:
        a = llm.engine.add_request(A[:10], warm())
        for _ in range(3):
            llm.engine.step()
        b = llm.engine.fork(a, seed=7)
        done = run_bounded(llm.engine, 60)
        assert_no_leak(llm.engine)
    assert done[b].outputs[0].token_ids == done[a].outputs[0].token_ids


def warm(**options):
    return SamplingParams(**({"temperature": 1.3, "seed": 7, "max_tokens": 10, "ignore_eos": True} | options))


def test_a_copy_with_the_same_seed_repeats_its_parent_and_others_do_not():
    with tiny_llm() as llm, Recorder(llm.engine) as recording:
        a = llm.engine.add_request("Hello", warm(logprobs=3))
        for _ in range(4):
            llm.engine.step()
        twin, other = llm.engine.fork(a, "twin", seed=7), llm.engine.fork(a, "other")
        done = run_bounded(llm.engine, 40)
        assert_no_leak(llm.engine)
        assert fold(recording.events).snapshot() == llm.engine.snapshot()
        assert llm.engine.metrics()["num_requests"] == 3
        assert llm.engine.metrics()["num_prompt_tokens"] == 6
    first, second, third = (done[rid].outputs[0] for rid in (a, twin, other))
    assert (first.token_ids, first.text) == (second.token_ids, second.text)
    assert second.cumulative_logprob == pytest.approx(first.cumulative_logprob, abs=1e-4)
    assert [list(row) for row in second.logprobs] == [list(row) for row in first.logprobs]
    assert first.token_ids[:4] == third.token_ids[:4]
    assert first.token_ids != third.token_ids
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_text_and_logprobs_of_another_last_token_are_those_of_its_own_run(steps):
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=4)
    with tiny_llm(num_blocks=64) as llm:
        a = llm.engine.add_request("Hello", params)
        for _ in range(steps):
            (output,) = llm.engine.step()
        known, row = output.outputs[0].token_ids, output.outputs[0].logprobs[-1]
        second = next(token for token, entry in row.items() if entry.rank == 2)
        b = llm.engine.fork(a, last_token_id=second)
        done = run_bounded(llm.engine, 40)[b]
        forced = [*done.prompt_token_ids, *known[:-1], second]
        more = SamplingParams(
            temperature=0.0, max_tokens=10 - steps, ignore_eos=True, logprobs=4, prompt_logprobs=4
        )
        (expected,) = llm.generate([forced], more, use_tqdm=False)
    got = done.outputs[0]
    assert got.token_ids == [*known[:-1], second, *expected.outputs[0].token_ids]
    assert got.text == llm.tokenizer.decode(got.token_ids)
    rows = [*expected.prompt_logprobs[6:], *expected.outputs[0].logprobs]
    total = 0.0
    for mine, theirs, token in zip(got.logprobs, rows, got.token_ids, strict=True):
        assert mine.keys() == theirs.keys()
        assert {t: e.logprob for t, e in mine.items()} == pytest.approx(
            {t: e.logprob for t, e in theirs.items()}, abs=1e-4
        )
        total += mine[token].logprob
    assert got.cumulative_logprob == pytest.approx(total)


def test_a_last_token_that_ends_the_output_or_has_no_logprob_is_refused():
    with tiny_llm(num_blocks=64) as llm:
        a = llm.engine.add_request(
            "Hello", SamplingParams(temperature=0.0, max_tokens=9, logprobs=1, stop=["Q", "xy"])
        )
        for _ in range(2):
            llm.engine.step()
        before = llm.engine.snapshot()
        with pytest.raises(RequestError, match="Token 257 ends the output"):
            llm.engine.fork(a, last_token_id=257)
        with pytest.raises(RequestError, match=r"Token 81 ends the output \('Q'\)"):
            llm.engine.fork(a, last_token_id=81)
        with pytest.raises(RequestError, match="Token 120 is not among the log-probabilities kept"):
            llm.engine.fork(a, last_token_id=120)
        assert llm.engine.snapshot() == before
        llm.engine.check()
        llm.engine.abort(a)


def test_a_fork_of_a_scored_prompt_has_its_scores():
    with tiny_llm(num_blocks=64, max_num_batched_tokens=4) as llm:
        a = llm.engine.add_request(A[:10], warm(prompt_logprobs=1))
        llm.engine.step()
        b = llm.engine.fork(a)  # in the middle of the prompt
        done = run_bounded(llm.engine, 40)
    assert len(done[b].prompt_logprobs) == 10
    assert done[b].prompt_logprobs[:5] == done[a].prompt_logprobs[:5]


def test_a_form_holds_for_the_copy_too():
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    from pagedinfer import StructuredOutputsParams

    params = warm(
        structured_outputs=StructuredOutputsParams(regex="[a-d]{6}[xy]{3}"), ignore_eos=False, max_tokens=20
    )
    with tiny_llm(num_blocks=64) as llm:
        a = llm.engine.add_request("Hello", params)
        for _ in range(4):
            llm.engine.step()
        b = llm.engine.fork(a)
        done = run_bounded(llm.engine, 40)
    texts = [done[rid].outputs[0].text for rid in (a, b)]
    assert all(
        len(text) == 9 and set(text[:6]) <= set("abcd") and set(text[6:]) <= set("xy") for text in texts
    )
    assert texts[0][:4] == texts[1][:4]


def test_an_outbox_and_the_end_of_all(story):
    s = story(16)
    s.add(A[:10], "a", max_tokens=3)
    s.add(B[:6], "b", max_tokens=3)
    s.step()
    box = deque()
    s.engine.fork("a", "copy", outbox=box)
    done = s.run()
    assert set(done) == {"a", "b"}
    assert [output.request_id for output in box] == ["copy"] * 2
    assert box[-1].finished


def test_random_forks_read_what_is_theirs(story):
    for seed in range(6):
        draw = random.Random(seed)
        s = story(
            draw.choice([8, 12, 20]),
            max_num_seqs=draw.choice([2, 4, 8]),
            max_num_batched_tokens=draw.choice([3, 9, 64]),
        )
        for _ in range(60):
            live = list(s.engine.scheduler.requests)
            if len(live) < 6 and draw.random() < 0.4:
                s.add(
                    draw.choice([A, B])[: draw.randint(1, 14)],
                    n=draw.choice([1, 1, 2, 3]),
                    max_tokens=draw.randint(1, 9),
                )
            elif live and draw.random() < 0.5:
                parent = draw.choice(live)
                last = draw.choice([None, 200]) if s.engine.request(parent).num_output_tokens else None
                if len(live) < 12:
                    s.engine.fork(parent, last_token_id=last)
            if live and draw.random() < 0.1:
                s.engine.abort(draw.choice(live))
            s.step()
        s.run()
        assert s.told("fork"), seed
