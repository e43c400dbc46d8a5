"""The prefix cache: who finds which block, what is evicted first, and why a look-up missed. Stories with literal ids.

Most run on the shadow, which checks that each step reads what its request would have computed itself; the blocks are
of 4 tokens, the pool is named, and `ask` sends one request at a time.
"""

import random

import pytest
from stories import A, B, C, story, tokens

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.options import Retain
from pagedinfer.errors import ConfigError
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.keys import KeyTable
from pagedinfer.model.tiny import TinyWeights, tiny_config
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.shadow import ShadowRunner
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    check_map,
    cold_outputs,
    force_preempt,
    tiny_llm,
    unused_blocks,
)
from pagedinfer.trace.bus import EventBus
from pagedinfer.trace.replay import fold

pytestmark = pytest.mark.usefixtures("one_thread")


__all__ = ["story"]  # the fixture


# -- publishing and hits ----------------------------------------------------------------------------------------------


def test_full_written_blocks_are_published_and_found(story):
    s = story(8)
    s.add(A[:10], "first", max_tokens=4)
    s.step()
    assert s.table("first") == [0, 1, 2]
    assert s.cached == [0, 1]  # block 2 has two tokens
    s.step()
    assert s.cached == [0, 1]  # three
    s.step()
    assert s.cached == [0, 1, 2]  # the output fills it: 10 prompt tokens and 2 of the 3 known output tokens
    s.add(A[:9], "second", max_tokens=2)
    s.step()  # the first takes block 3, and ends
    assert s.table("second") == [0, 1, 4]
    assert s.engine.request("second").num_cached_tokens == 8
    s.run()
    assert s.idle == {"50": [2, 1, 0]}
    assert unused_blocks(s.engine.snapshot()) == [5, 6, 7, 3, 4, 2, 1, 0]
    assert [(e.rid, e.pblks, e.parent) for e in s.told("cache")] == [
        ("first", (0, 1), -1),
        ("first", (2,), s.told("cache")[0].keys[1]),
    ]


def test_a_live_request_is_shared_as_well(story):
    s = story(8)
    s.add(A[:9], "a", max_tokens=9)
    s.step()
    s.add([*A[:8], *B[:3]], "b", max_tokens=9)
    s.step()
    assert (s.table("a"), s.table("b")) == ([0, 1, 2], [0, 1, 3])
    assert s.engine.snapshot()["ref_counts"] == {"0": 2, "1": 2, "2": 1, "3": 1}
    assert s.engine.metrics()["prefix_hit_rate"] == 8 / 20


def test_a_hit_ends_at_the_first_other_token(story):
    s = story(16)
    s.ask(A[:16])
    assert s.hit([*A[:7], 99, *A[8:16]]) == 4
    assert s.hit([99, *A[1:16]]) == 0
    assert s.hit(A[4:16]) == 0  # the same tokens at another place
    assert s.hit([*A[:15], 99]) == 12


def test_the_output_is_found_by_the_next_turn(story):
    s = story(16)
    output = s.ask(A[:6], max_tokens=7)
    turn = [*A[:6], *output.outputs[0].token_ids]
    assert len(turn) == 13
    assert s.hit([*turn, 99]) == 12  # the last output token was never computed; three blocks were


@pytest.mark.parametrize("length", [4, 8, 12])
def test_a_full_hit_computes_the_last_token(story, length):
    s = story(8)
    first = s.ask(A[:length])
    output = s.ask(A[:length])
    assert output.num_cached_tokens == length - 4
    assert output.outputs[0].token_ids == first.outputs[0].token_ids
    assert s.told("step")[-1].scheduled == {"r1": 4}
    expected = "the last token is always computed" if length > 4 else "no full block before the last token"
    assert output.cache_note == expected


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5])
def test_bm_02_a_full_hit_leaves_the_chain_whole(story, num_blocks):
    s = story(16)
    prompt = A[: 4 * num_blocks]
    s.ask(prompt)
    s.ask(prompt)
    assert s.hit([*prompt, 99]) == 4 * num_blocks
    s.ask(prompt, max_tokens=3)
    assert s.hit([*prompt, 99, 98]) == 4 * num_blocks
    assert len(s.cached) == num_blocks


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_blocks_without_content_go_first_then_chains_from_their_tails(story):
    s = story(7)
    s.ask(A[:8])  # 0 1
    s.ask(B[:12])  # 2 3 4
    assert unused_blocks(s.engine.snapshot()) == [5, 6, 1, 0, 4, 3, 2]
    s.ask(C[:11])  # 5 6 and the tail of A, whose block 2 is not full
    assert [e.pblks for e in s.told("evict")] == [(1,)]
    assert s.told("evict")[0].why == "r2 needs 3 blocks"
    assert unused_blocks(s.engine.snapshot()) == [1, 0, 4, 3, 2, 6, 5]
    assert s.hit(A[:9]) == 4  # takes 1 and evicts the tail of B
    assert [e.pblks for e in s.told("evict")[1:]] == [(4,)]
    assert s.hit([*B[:12], 99]) == 8


def test_who_was_used_last_is_evicted_last(story):
    s = story(6)
    s.ask(A[:8])  # 0 1
    s.ask(B[:8])  # 2 3
    assert s.hit(A[:9]) == 8
    assert unused_blocks(s.engine.snapshot()) == [5, 4, 3, 2, 1, 0]
    s.ask(C[:15])  # 5 4 and all of B
    assert [e.pblks for e in s.told("evict")] == [(3, 2)]
    assert s.hit([*A[:8], 99]) == 8


def test_what_a_request_has_found_is_not_evicted_for_its_own_sake(story):
    s = story(4)
    s.ask(A[:12])  # 0 1 2
    s.add([*A[:8], *B[:8]], "more", max_tokens=1)  # four blocks: two found, one free, one evicted
    s.step()
    assert s.told("hit")[-1].n == 8
    assert [e.pblks for e in s.told("alloc")][-1] == (3, 2)
    assert [e.pblks for e in s.told("evict")] == [(2,)]


def test_what_a_request_has_found_is_not_evicted_for_the_next_one_in_the_step(story):
    s = story(6)
    s.ask(A[:8])  # 0 1
    s.ask(B[:8])  # 2 3
    s.add([*A[:8], 99], "a", max_tokens=3)
    s.add(C[:9], "c", max_tokens=3)
    s.step()
    assert (s.table("a"), s.table("c")) == ([0, 1, 4], [5, 3, 2])
    assert [e.pblks for e in s.told("evict")] == [(3, 2)]


def test_blocks_that_look_free_but_are_to_be_shared_are_not_counted_twice(story):
    s = story(4)
    s.ask(A[:8])  # 0 1
    s.add(B[:7], "b", max_tokens=2)  # 2 3
    s.step()
    s.add([*A[:8], *C[:4]], "c", max_tokens=1)  # three blocks; the two free ones are those that it shares
    s.step()
    assert s.told("step")[-1].reasons == {"c": "needs 1 block beside 2 cached, 0 free"}
    s.run()
    assert s.told("hit")[-1].n == 8


# -- known faults -----------------------------------------------------------------------------------------------------


class SameHash(int):
    """A token id whose hash says nothing."""

    def __hash__(self):
        return 7


def llm_with(**options):
    return tiny_llm(**({"num_blocks": 32, "watermark": 0.0} | options))


def greedy(max_tokens=6, **options):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def test_bm_04_equal_hashes_never_share():
    one, two = [list(map(SameHash, tokens(start, 13))) for start in (10, 50)]
    prompts = [one, two, [*one[:4], *two[4:]], [*two[:4], *one[4:]], one]
    assert len({hash(tuple(prompt)) for prompt in prompts}) == 1
    cold = cold_outputs([list(map(int, prompt)) for prompt in prompts], greedy())
    with llm_with() as llm:
        outputs = [llm.generate([prompt], greedy(), use_tqdm=False)[0] for prompt in prompts]
        check_map(llm.engine)
    assert_same(outputs, cold)
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 4, 4, 12]


def test_bm_04_the_same_tokens_under_two_parents(story):
    s = story(16)
    s.ask([*A[:4], *C[:4], 99])
    assert s.hit([*B[:4], *C[:4], 99]) == 0
    assert s.hit([*B[:4], *C[:4], 99]) == 8
    assert s.hit([*C[:4], *C[:4], 99]) == 0
    assert s.hit([*A[:4], *C[:4], 99]) == 8


def test_bm_04_keys_with_one_hash_are_still_two(monkeypatch):
    from pagedinfer.memory.keys import BlockKey

    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 7)
    prompts = [tokens(start, 13) for start in (10, 50)]
    with llm_with() as llm:
        outputs = llm.generate([*prompts, *prompts], greedy(), use_tqdm=False)
        outputs += llm.generate(prompts, greedy(), use_tqdm=False)
        check_map(llm.engine)
    assert_same(outputs, cold_outputs([*prompts] * 3, greedy()))
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0, 12, 12]


@pytest.mark.parametrize("first_to_end", ["a", "b"])
def test_bm_06_twins_of_one_step(first_to_end):
    prompt, other = tokens(10, 8), tokens(50, 24)
    lengths = {"a": 12, "b": 12} | {first_to_end: 1}
    with llm_with(num_blocks=9) as llm:
        engine = llm.engine
        for rid, max_tokens in lengths.items():
            engine.add_request(prompt, greedy(max_tokens), rid)
        done = {output.request_id: output for output in engine.step() if output.finished}
        check_map(engine)
        assert list(done) == [first_to_end]
        assert {block: key for block, (_, key) in engine.snapshot()["cached"].items()} == {"0": 0, "1": 1}
        lives = "ab".replace(first_to_end, "")
        assert engine.snapshot()["block_tables"] == {lives: [0, 1] if lives == "a" else [2, 3]}
        engine.add_request(other, greedy(1), "other")  # takes six blocks, those of the ended twin among them
        engine.add_request([*prompt, 99], greedy(), "third")
        for _ in range(60):
            if not engine.has_unfinished():
                break
            done.update((output.request_id, output) for output in engine.step() if output.finished)
            check_map(engine)
        found = {"a": 0, "b": 8}[first_to_end]  # the published twin has gone, or lives
        assert done["third"].num_cached_tokens == found
        assert_no_leak(engine)
        again = llm.generate([[*prompt, 99]], greedy(), use_tqdm=False)[0]
    cold = cold_outputs(
        [prompt, prompt, other, [*prompt, 99], [*prompt, 99]],
        [greedy(lengths["a"]), greedy(lengths["b"]), greedy(1), greedy(), greedy()],
    )
    assert_same([done["a"], done["b"], done["other"], done["third"], again], cold)


@pytest.mark.parametrize(("max_tokens", "found"), [(1, 8), (5, 4), (9, 0)])
def test_bm_08_the_look_up_is_repeated_at_admission(max_tokens, found):
    prefix, long = tokens(10, 8), tokens(50, 24)
    wanted = [*prefix, *tokens(100, 4)]
    with llm_with(num_blocks=8) as llm, Recorder(llm.engine) as recording:
        llm.generate([prefix], greedy(1), use_tqdm=False)  # 0 1
        llm.engine.add_request(long, greedy(max_tokens), "long")  # all others; later 1, then 0
        llm.engine.step()
        llm.engine.add_request(wanted, greedy(3), "waits")
        done = {}
        for _ in range(40):
            if llm.engine.has_unfinished():
                done.update((o.request_id, o) for o in llm.engine.step() if o.finished)
                check_map(llm.engine)
    reasons = [e.reasons["waits"] for e in recording.events if e.kind == "step" and "waits" in e.reasons]
    sentences = ["needs 2 blocks beside 1 cached, 0 free", "needs 3 blocks, 0 free"]
    assert list(dict.fromkeys(reasons)) == sentences[: {8: 0, 4: 1, 0: 2}[found]]
    assert done["waits"].num_cached_tokens == found
    assert_same([done["waits"]], cold_outputs([wanted], greedy(3)))
    if found < 8:
        assert done["waits"].cache_note.startswith(
            f"block {found // 4} (tokens {found} to {found + 3}) was evicted in step"
        )


def test_bm_10_freed_and_hit_over_and_over(story):
    s = story(6)
    for turn in range(4):
        assert s.hit(A[:9]) == (8 if turn else 0)
        assert s.idle == {"50": [1, 0]}
        assert sorted(unused_blocks(s.engine.snapshot())) == [0, 1, 2, 3, 4, 5]
    s.ask(B[:24])  # all six
    assert s.cached == [0, 1, 2, 3, 4, 5]
    assert s.hit(A[:9]) == 0


@pytest.mark.parametrize("seed", range(4))
def test_bm_10_seeded_traffic_with_swaps(story, seed):
    draw = random.Random(seed)
    s = story(9, num_host_blocks=5, preempt_mode="swap", max_num_batched_tokens=11)
    for turn in range(120):
        if draw.random() < 0.5 and len(s.engine.scheduler.requests) < 5:
            stem = draw.choice([A, B, C])[: draw.randint(1, 20)]
            s.add(
                [*stem, *tokens(draw.randrange(120, 200), draw.randint(0, 3))], max_tokens=draw.randint(1, 9)
            )
        running = s.engine.scheduler.running
        if running and draw.random() < 0.3:
            victim = draw.choice(running).request_id
            s.engine.scheduler.preempt(victim, "drawn", draw.choice(["swap", "recompute"]))
        s.step()
        snapshot = s.engine.snapshot()
        free = unused_blocks(snapshot)
        assert len(free) == len(set(free)), f"seed {seed}, turn {turn}"
        assert set(free) == {b for b in range(9) if str(b) not in snapshot["ref_counts"]}, f"turn {turn}"
    assert {e.mode for e in s.told("preempt")} == {"swap", "recompute"}
    assert {e.dir for e in s.told("swap")} == {"in", "out"}
    assert sum(e.n for e in s.told("hit")) > 0
    assert s.told("evict")


def change_weights(llm):
    """Other weights in place, as a quantization or a fine-tuned checkpoint would bring them."""
    llm.engine.runner._decoder.load(TinyWeights(tiny_config(), seed=1))


def test_bm_14_after_a_change_of_weights_the_cache_is_emptied():
    prompt = tokens(10, 17)
    with llm_with() as fresh:
        change_weights(fresh)
        expected = fresh.generate([prompt], greedy(), use_tqdm=False)
    with llm_with() as stale:
        before = stale.generate([prompt], greedy(), use_tqdm=False)
        change_weights(stale)
        (mixed,) = stale.generate([prompt], greedy(), use_tqdm=False)
    assert mixed.num_cached_tokens == 16
    assert mixed.outputs[0].token_ids != expected[0].outputs[0].token_ids, (
        "old keys do no harm: choose another prompt"
    )
    with llm_with() as llm, Recorder(llm.engine) as recording:
        assert_same(llm.generate([prompt], greedy(), use_tqdm=False), before)
        change_weights(llm)
        assert llm.engine.reset_prefix_cache("other weights")
        after = llm.generate([prompt], greedy(), use_tqdm=False)
        assert_same(after, expected)
        assert after[0].num_cached_tokens == 0
        assert "was dropped in step 6 (other weights)" in after[0].cache_note
        assert fold(recording.events).snapshot() == llm.engine.snapshot()
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_bm_14_a_reset_says_no_while_blocks_are_in_use(story):
    s = story(8)
    s.ask(A[:8])
    s.add(B[:5], "busy", max_tokens=3)
    assert s.engine.reset_prefix_cache()  # it only waits: it has no blocks
    s.add(A[:8], "again", max_tokens=2)
    s.step()
    before = s.engine.snapshot()
    assert not s.engine.reset_prefix_cache()
    assert s.engine.snapshot() == before
    plan_open = []
    with s.engine.bus.subscribe(lambda event: plan_open.append(s.engine.reset_prefix_cache())):
        s.engine.step()
    assert plan_open
    assert not any(plan_open)
    s.run()
    assert s.engine.reset_prefix_cache("done with it")
    assert s.cached == []
    assert s.told("reset")[-1].why == "done with it"
    assert s.hit(A[:9]) == 0


def test_bm_16_work_done_again_is_no_hit(story):
    s = story(8, max_num_seqs=4)
    for number in range(6):
        s.add(tokens(20 * number, 9), max_tokens=12)
    done = s.run()
    assert s.engine.metrics()["num_preemptions"] > 0
    assert s.engine.metrics()["prefix_hit_rate"] == 0.0
    assert {output.num_cached_tokens for output in done.values()} == {0}


def test_bm_16_own_blocks_are_counted_apart(story):
    s = story(8)
    s.add(A[:9], "a", max_tokens=6)
    s.step()
    s.step()
    force_preempt(s.engine, "a")
    s.step()
    assert [(e.rid, e.n) for e in s.told("hit")] == [("a", 0), ("a", 8)]
    assert s.engine.request("a").num_cached_tokens == 0
    assert s.engine.metrics()["prefix_hit_rate"] == 0.0
    s.run()
    output = s.ask(A[:9])
    assert output.num_cached_tokens == 8
    assert s.engine.metrics()["prefix_hit_rate"] == 8 / 18


# -- who may share ----------------------------------------------------------------------------------------------------


def test_only_equal_salts_share(story):
    s = story(32)
    assert s.hit(A[:9]) == 0
    assert s.hit(A[:9], cache_salt="mine") == 0
    assert s.hit(A[:9], cache_salt="yours") == 0
    assert s.hit(A[:9], cache_salt="mine") == 8
    assert s.hit(A[:9]) == 8


def test_a_salt_is_no_other_kind_of_tag():
    table = KeyTable()
    salt, adapter = table.root(salt="x"), table.root(adapter="x")
    assert salt is not adapter
    assert salt is table.root(salt="x", adapter="", kv_dtype="")
    assert table.root() is None is table.root(salt="")
    assert (
        len({id(key) for key in (salt, adapter, table.root(kv_dtype="x"), table.root(salt="x", adapter="x"))})
        == 4
    )
    chains = [[], [], []]
    for chain, root in zip(chains, (None, salt, adapter), strict=True):
        table.extend(chain, root, [1, 2, 3, 4, 5], 2)
    assert len({key.id for chain in chains for key in chain}) == 6
    held = list(chains[1])
    chains[1].clear()
    table.extend(chains[1], salt, [1, 2, 3, 4], 2)
    assert chains[1] == held


def test_a_prompt_that_is_scored_takes_nothing_from_the_cache():
    prompt = tokens(10, 17)
    with llm_with() as llm:
        plain = llm.generate([prompt], greedy(), use_tqdm=False)
        (scored,) = llm.generate([prompt], greedy(prompt_logprobs=1), use_tqdm=False)
        again = llm.generate([prompt], greedy(), use_tqdm=False)
        rate = llm.engine.metrics()["prefix_hit_rate"]
    assert scored.num_cached_tokens == 0
    assert scored.cache_note == "it has no block keys: its prompt is scored, or it came without tokens"
    assert len(scored.prompt_logprobs) == 17
    assert_same([scored, *again], [*plain, *plain])
    assert again[0].num_cached_tokens == 16
    assert rate == 16 / 51


def test_without_the_cache_nothing_is_found(story):
    s = story(16, enable_prefix_caching=False)
    s.ask(A[:9])
    output = s.ask(A[:9])
    assert (output.num_cached_tokens, output.cache_note) == (0, "")
    assert s.cached == []
    assert s.told("hit", "cache", "share") == []


# -- why not more -----------------------------------------------------------------------------------------------------


def test_each_look_up_says_why_it_is_not_more(story):
    s = story(8)
    note = lambda prompt, **options: s.ask(prompt, **options).cache_note  # noqa: E731
    assert note(A[:9]) == "block 0 (tokens 0 to 3) is new"
    assert note([*A[:4], *B[:5]]) == "block 1 (tokens 4 to 7) is new"
    assert note(A[:3]) == "no full block before the last token"
    assert note(A[:8]) == "the last token is always computed"
    assert note(A[:10]) == "no more full blocks"
    s.ask(C[:32])
    assert note(A[:9]) == "block 0 (tokens 0 to 3) was evicted in step 6"
    s.engine.reset_prefix_cache("a new model")
    assert note(A[:9]) == "block 0 (tokens 0 to 3) was dropped in step 7 (a new model)"


# -- retention --------------------------------------------------------------------------------------------------------


def test_lower_priorities_are_evicted_first(story):
    s = story(8)
    s.ask(A[:8], retain=[Retain(priority=90)])  # 0 1
    s.ask(B[:8])  # 2 3
    s.ask(C[:8], retain=[Retain(priority=10)])  # 4 5
    assert s.idle == {"10": [5, 4], "50": [3, 2], "90": [1, 0]}
    s.ask(tokens(120, 27))
    assert [e.pblks for e in s.told("evict")] == [(5, 4, 3, 2, 1)]
    assert s.hit(A[:9]) == 4


def test_a_range_is_of_tokens_and_a_block_belongs_where_it_begins(story):
    s = story(8)
    s.ask(A[:17], retain=[Retain(start=3, end=9, priority=70), Retain(start=12, priority=30)])
    assert s.engine.snapshot()["retained"] == {"1": [70, -1.0], "2": [70, -1.0], "3": [30, -1.0]}
    assert s.idle == {"30": [3], "50": [0], "70": [2, 1]}
    s.ask(B[:3], retain=[Retain(start=0, priority=70)])  # no full block: nothing to retain
    assert len(s.told("retain")) == 2


def test_a_wish_counts_for_blocks_that_are_there_already(story):
    s = story(8)
    s.ask(A[:9])
    assert s.hit(A[:9], retain=[Retain(priority=80)]) == 8
    assert s.idle == {"80": [1, 0]}
    assert s.hit(A[:9], retain=[Retain(priority=20)]) == 8  # nobody takes away what another one asked for
    assert s.idle == {"80": [1, 0]}
    assert s.hit(A[:9], retain=[Retain(end=4, priority="pin")]) == 8
    assert s.idle == {"80": [1], "101": [0]}


def test_pins_stay_while_others_can_wait(story):
    s = story(6)
    s.ask(A[:8], retain=[Retain(priority="pin")])  # 0 1
    assert s.engine.metrics()["num_free_blocks"] == 4
    s.add(B[:9], "b", max_tokens=3)  # 2 3 4
    s.step()
    s.add(C[:8], "c", max_tokens=3)
    s.step()
    assert s.told("step")[-1].reasons == {"c": "needs 2 blocks, 1 free"}
    s.run()
    assert s.told("expire") == []
    assert s.hit(A[:9]) == 8
    assert s.idle["101"] == [1, 0]


def test_pins_yield_when_nobody_else_could_run(story):
    s = story(4)
    s.ask(A[:8], retain=[Retain(priority="pin")])
    s.ask(B[:12])
    assert [e.pblks for e in s.told("expire")] == [(1, 0)]
    assert [e.pblks for e in s.told("evict")] == [(1,)]


def test_pins_yield_to_a_request_that_is_alone_and_grows(story):
    s = story(4)
    s.ask(A[:8], retain=[Retain(priority="pin")])
    output = s.ask(B[:7], max_tokens=9)  # 15 computed tokens in the end
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 9
    assert [e.pblks for e in s.told("expire")] == [(1, 0)]
    assert s.told("preempt") == []


def test_retention_ends_at_its_time(story):
    s = story(12)
    s.ask(C[:5])  # the clock is 1 now
    s.add(A[:8], retain=[Retain(priority=90, seconds=3), Retain(start=4, end=8, priority="pin", seconds=5)])
    s.add(B[:5], "lives", max_tokens=12)
    ends = {}
    for _ in range(9):
        s.step()
        ends |= {e.pblks: e.step for e in s.told("expire")}
    steps = {e.step: e.now for e in s.told("step")}
    assert [(pblks, steps[step]) for pblks, step in ends.items()] == [((2,), 4), ((3,), 6)]
    assert s.engine.snapshot()["retained"] == {}
    assert s.idle["50"][-2:] == [2, 3]  # they begin anew as used just now


def test_what_cannot_be_retained_is_refused(story):
    for options, words in (
        ({"priority": 101}, "priority of a retained range=101"),
        ({"priority": "high"}, "priority of a retained range='high'"),
        ({"start": -1}, "start=-1"),
        ({"start": 4, "end": 4}, "end=4"),
        ({"seconds": -1.0}, "seconds=-1.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            Retain(**options)
    with pytest.raises(ConfigError, match="retain holds 5"):
        story(4).add(A[:4], retain=[5])


# -- windows ----------------------------------------------------------------------------------------------------------


def test_a_hit_with_a_sliding_window_shares_what_the_window_still_sees():
    config = EngineConfig(num_blocks=24, block_size=4, group_windows=(None, 6), max_model_len=128)
    engine = Engine(config, ShadowRunner(24, 4, windows=(None, 6)))
    recording = Recorder(engine).start()
    for prompt in (A[:17], [*A[:16], 99, 98]):
        engine.add_request(prompt, SamplingParams(max_tokens=3, seed=1))
        while engine.has_unfinished():
            (output,) = engine.step()
            engine.check()
            assert fold(recording.events).snapshot() == engine.snapshot()
    assert output.num_cached_tokens == 16
    shares = [(e.group, e.first, len(e.pblks)) for e in recording.events if e.kind == "share"]
    assert shares == [(0, 0, 4), (1, 2, 2)]
    assert_no_leak(engine)
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


# -- the block manager alone ------------------------------------------------------------------------------------------


def test_attach_gives_no_more_than_is_asked_for():
    blocks, table, chain = BlockManager(8, 4, EventBus()), KeyTable(), []
    table.extend(chain, None, A[:16], 4)
    blocks.allocate("a", 16)
    blocks.publish("a", chain, 15)  # three are full
    assert blocks.num_cached(chain, 16) == 12
    assert blocks.attach("b", chain[:2], 16) == (8, "no more full blocks")
    assert blocks.attach("c", chain, 9) == (8, "the last token is always computed")
    assert blocks.attach("d", chain, 17) == (12, "block 3 (tokens 12 to 15) is new")
    assert blocks.attach("e", [], 16)[0] == 0
    assert [blocks.table(rid) for rid in "bcde"] == [[0, 1], [0, 1], [0, 1, 2], []]
    assert [blocks.ref_count(b) for b in range(4)] == [4, 4, 2, 1]
    blocks.check()
