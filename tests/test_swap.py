"""Swap on real tensors: victims wait on the host with all their bytes, and come back as if nothing had been."""

import pytest
import torch
from scheduling import Story

from pagedinfer import Recorder, SamplingParams
from pagedinfer.config import EngineConfig
from pagedinfer.errors import ConfigError
from pagedinfer.sim.shadow import ShadowMemory
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    cold_outputs,
    force_preempt,
    run_bounded,
    tiny_llm,
    unused_blocks,
)

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PROMPTS = [[10 + i] * n for i, n in enumerate((9, 5, 14, 3, 11))]
CROWDED = {
    "num_blocks": 11, "block_size": 4, "max_num_batched_tokens": 16, "admission": "fits-now", "preempt_mode": "swap",
}  # fmt: skip


@pytest.fixture(scope="module")
def references(one_thread):
    return cold_outputs(PROMPTS, GREEDY)


def crowded(**options):
    """The tiny model in a pool that is too small for all, the shadow watching every slot."""
    llm = tiny_llm(**(CROWDED | options))
    config = llm.engine.config
    ShadowMemory(config.num_blocks, config.block_size, config.num_host_blocks).watch(llm.engine.runner)
    return llm


def serve(llm, prompts=PROMPTS):
    """All prompts through the engine, to the end; outputs in order, and the recording."""
    with Recorder(llm.engine) as recording:
        rids = [llm.engine.add_request(prompt, GREEDY) for prompt in prompts]
        done = run_bounded(llm.engine, 500)
    assert_drained(llm.engine)
    return [done[rid] for rid in rids], recording


def assert_drained(engine):
    """LEAK, on both pools."""
    assert_no_leak(engine)
    snapshot = engine.snapshot()
    assert sorted(snapshot["host_free"]) == list(range(engine.config.num_host_blocks))


def swaps(recording, way):
    return [event for event in recording.events if event.kind == "swap" and event.dir == way]


def modes(recording):
    return {event.mode for event in recording.events if event.kind == "preempt"}


# -- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "cheaper"])
def test_tokens_are_the_cold_runs(references, mode, caching):
    with crowded(num_host_blocks=32, preempt_mode=mode, enable_prefix_caching=caching) as llm:
        outputs, recording = serve(llm)
    assert_same(outputs, references)
    assert len(swaps(recording, "out")) == len(swaps(recording, "in")) > 0
    assert "swap" in modes(recording)


def test_nothing_that_was_swapped_is_computed_again(references):
    """Every token of prompt and output is computed once: what swapping is for."""
    with crowded(num_host_blocks=32, enable_prefix_caching=False) as llm:
        outputs, recording = serve(llm)
    assert swaps(recording, "in")
    computed = sum(sum(event.scheduled.values()) for event in recording.events if event.kind == "step")
    assert computed == sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)


# -- bytes ------------------------------------------------------------------------------------------------------------


class BytesWatched:
    """Compares each swapped block with what was there before, bit for bit, as soon as the operations have run."""

    def __init__(self, runner):
        self.kv, self.host, self.run = runner.kv, runner._host, runner._ops.run
        self.moved, self.out = 0, {}
        runner._ops.run = self

    def bits(self, parts):
        return [part.clone().view(torch.int32) for part in parts]

    def __call__(self, ops, overwritten=()):
        before = self.bits(self.kv.read_out(list(range(self.kv.num_blocks))))
        result = self.run(ops, overwritten)
        for op in ops:
            assert op.kind in ("swap_out", "swap_in", "copy")
            for source, to in op.pairs:
                if op.kind == "swap_out":
                    self.out[to] = [part[:, source] for part in before]
                    there = self.bits(self.host.read_out([to]))
                    assert all(torch.equal(a[:, 0], b) for a, b in zip(there, self.out[to], strict=True))
                elif op.kind == "swap_in":
                    back = self.bits(self.kv.read_out([to]))
                    assert all(
                        torch.equal(a[:, 0], b) for a, b in zip(back, self.out.pop(source), strict=True)
                    )
                self.moved += op.kind != "copy"
        assert result[0] == sum(len(op.pairs) for op in ops) * self.kv.bytes_per_block
        return result


def test_bytes_are_exact_and_counted():
    with crowded(num_host_blocks=32) as llm:
        watched = BytesWatched(llm.engine.runner)
        _, recording = serve(llm)
        assert (
            watched.moved
            == sum(len(event.pairs) for way in ("in", "out") for event in swaps(recording, way))
            > 0
        )
        assert not watched.out  # each block that went out came back in


def test_of_02_a_block_is_copied_out_before_its_next_owner_writes():
    """OF-02, as far as it applies: copies run in the plan's order before the forward pass, nothing is in flight.

    The block is filled in one step, swapped out and handed to another request in the next. What is on the host is
    what the first had written. (That host slots being read are not given away before the commit: `test_tiers`.)
    """
    with crowded(num_host_blocks=32, enable_prefix_caching=False) as llm:
        watched = BytesWatched(llm.engine.runner)  # compares with the bytes from before the plan
        reused = []
        execute = llm.engine.runner.execute

        def look(plan):
            gone = {block for op in plan.ops if op.kind == "swap_out" for block, _ in op.pairs}
            reused.extend(gone & {block for item in plan.scheduled for block in item.new_block_ids})
            return execute(plan)

        llm.engine.runner.execute = look
        outputs, _ = serve(llm)
        assert reused, "no block was swapped out and handed out in one plan"
        assert watched.moved
        assert_same(outputs, cold_outputs(PROMPTS, GREEDY))


# -- a host pool that is too small ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_host_blocks", [0, 1, 2, 3])
def test_of_04_without_room_on_the_host_victims_recompute(references, num_host_blocks):
    """Pools of none, one and too few: that victim recomputes, everybody ends, both pools are whole."""
    options = {"num_host_blocks": num_host_blocks}
    if not num_host_blocks:
        options["preempt_mode"] = "recompute"
    with crowded(**options) as llm:
        outputs, recording = serve(llm)
        assert_same(outputs, references)
    told = [event for event in recording.events if event.kind == "preempt"]
    assert told
    assert "recompute" in modes(recording)
    if num_host_blocks:
        short = [event.why for event in told if event.mode == "recompute"]
        assert all("host slots free for" in why for why in short)
    assert all(len(event.pairs) <= num_host_blocks for event in swaps(recording, "out"))


def test_of_04_swap_without_a_host_pool():
    with pytest.raises(ConfigError, match=r"preempt_mode='swap' needs a host pool; set num_host_blocks"):
        EngineConfig(num_blocks=8, preempt_mode="swap")
    story = Story(num_blocks=8)
    story.submit("a", 6, 4)
    story.run(2)
    story.scheduler.preempt("a", "forced", "swap")
    (told,) = story.told("preempt")
    assert (told.mode, told.why) == ("recompute", "forced; 0 host slots free for 2 blocks")
    story.run()


def test_of_04_several_victims_in_one_step():
    """A chunk of a takes two blocks, of two victims; the host has room for one of them."""
    for num_host_blocks, expected in (
        (8, ["swap", "swap"]),
        (1, ["swap", "recompute"]),
        (0, ["recompute"] * 2),
    ):
        mode = "swap" if num_host_blocks else "recompute"
        story = Story(
            num_blocks=4, num_host_blocks=num_host_blocks, preempt_mode=mode, admission="fits-now",
            max_chunk_tokens=8,
        )  # fmt: skip
        story.submit("a", 16, 1)
        story.submit("b", 3, 5)
        story.submit("c", 2, 5)
        assert story.run(1) == [{"a": 8, "b": 3, "c": 2}]
        plan = story.step()
        assert plan.preempted == ["c", "b"]
        assert [event.mode for event in story.told("preempt")] == expected
        story.run()
        assert set(story.ends.values()) == {"length"}


def test_of_06_what_could_not_be_copied_is_not_taken_for_a_copy():
    """OF-06, as far as it applies: the host is full of another's blocks, so the victim has no copy there.

    It is not marked as swapped and has no host table; its blocks go, and a look-up finds only what the prefix cache
    still holds on the device. (We write back nothing on eviction: a block is on the host for a swapped request only.)
    """
    with crowded(num_host_blocks=3, max_num_seqs=2) as llm:
        scheduler = llm.engine.scheduler
        rids = [llm.engine.add_request([5 + i] * 9, GREEDY) for i in range(2)]
        for _ in range(3):
            llm.engine.step()
        scheduler.preempt(rids[0], "forced", "swap")  # 9 tokens and more: all 3 slots
        scheduler.preempt(rids[1], "forced", "swap")
        snapshot = llm.engine.snapshot()
        assert snapshot["swapped"] == [rids[0]]
        assert snapshot["waiting"] == [rids[1]]
        assert snapshot["host_tables"].keys() == {rids[0]}
        assert snapshot["requests"][rids[1]]["num_computed_tokens"] == 0
        assert scheduler.requests[rids[1]].status == "preempted"
        # The copy on the host does not run before the next step, so nothing may be overwritten before it.
        poisoned = set(unused_blocks(snapshot)) & set(snapshot["free"]) - {
            block for op in scheduler.blocks.ops for block, _ in op.pairs
        }
        llm.engine.runner.kv.pool[:, sorted(poisoned)] = float("nan")
        done = run_bounded(llm.engine, 100)
        assert_same([done[rid] for rid in rids], cold_outputs([[5] * 9, [6] * 9], GREEDY))
        assert_drained(llm.engine)


# -- order, ends, failures --------------------------------------------------------------------------------------------


def test_swapped_requests_return_before_new_ones():
    story = Story(max_num_seqs=2, num_host_blocks=8, preempt_mode="swap")
    for rid in ("a", "b"):
        story.submit(rid, 4, 12)
    story.run(2)
    story.scheduler.preempt("b", "forced", "swap")
    story.scheduler.preempt("a", "forced", "swap")
    story.submit("new", 4, 2)
    assert story.scheduler.snapshot()["swapped"] == ["a", "b"]
    assert story.run(1) == [{"a": 1, "b": 1}]  # their next tokens, nothing again
    assert story.step().reasons == {"new": "all 2 seats (max_num_seqs) are taken"}
    story.run()


def test_a_swapped_request_that_cannot_return_keeps_new_ones_out():
    story = Story(num_blocks=6, num_host_blocks=8, preempt_mode="swap")
    story.submit("a", 12, 9)
    story.submit("b", 8, 9)
    story.run(3)
    assert story.scheduler.snapshot()["swapped"] == ["b"]
    story.submit("new", 1, 1)  # its one block is free
    plan = story.step()
    assert plan.reasons == {"b": "needs 3 blocks, 2 free"}
    story.run()
    assert story.first_steps() == ["a", "b", "new"]


def test_abort_while_swapped(references):
    with crowded(num_host_blocks=16) as llm:
        rids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        while not llm.engine.snapshot()["swapped"]:
            llm.engine.step()
        (gone, *_) = llm.engine.snapshot()["swapped"]
        output = llm.engine.abort(gone)
        assert output.outputs[0].finish_reason == "abort"
        assert gone not in llm.engine.snapshot()["host_tables"]
        llm.engine.check()
        done = run_bounded(llm.engine, 300)
        cold = dict(zip(rids, references, strict=True))
        rest = [rid for rid in rids if rid != gone]
        assert_same([done[rid] for rid in rest], [cold[rid] for rid in rest])
        assert_drained(llm.engine)


@pytest.mark.parametrize("kind", ["swap_out", "swap_in"])
def test_a_runner_that_fails_after_the_operations_loses_nothing(references, kind):
    """The plan is cancelled: books and bytes are those of before, and the next try gives what it should."""
    with crowded(num_host_blocks=32) as llm:
        runner = llm.engine.runner
        compute, failed, plans = runner._compute, [], []

        def fail(decoder, plan):
            plans.append(plan)
            if not failed and any(op.kind == kind for op in plan.ops):
                compute(decoder, plan)  # it has written, too
                failed.append(plan)
                raise RuntimeError("out of memory, perhaps")
            return compute(decoder, plan)

        runner._compute = fail
        rids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        done = {}
        while llm.engine.has_unfinished():
            before, blocks = llm.engine.snapshot(), runner.kv.pool.clone()
            try:
                outputs = llm.engine.step()
            except RuntimeError:
                assert llm.engine.snapshot() == before
                held = [b for table in before["block_tables"].values() for b in table]
                cached = [int(block) for block in before["cached"]]
                for block in {*held, *cached}:  # slots that the failed step wrote will be written again
                    same = runner.kv.pool[:, block] == blocks[:, block]
                    fresh = blocks[:, block].isnan()
                    assert (same | fresh).all() or block in written_by(failed[0])
                continue
            done |= {output.request_id: output for output in outputs if output.finished}
            llm.engine.check()
        assert len(failed) == 1
        assert_same([done[rid] for rid in rids], references)
        assert_drained(llm.engine)


def written_by(plan):
    """Blocks that a plan's rows write into: what they write there is wanted, the cancel need not undo it."""
    return {
        item.block_table[position // 4] for item in plan.scheduled for position in range(item.start, item.end)
    }


def test_a_swap_from_outside_survives_a_cancelled_plan():
    """The copy out is asked for between two steps and runs with the next plan: a cancel must not lose it."""
    with crowded(num_host_blocks=8, num_blocks=20) as llm:
        rid = llm.engine.add_request([7] * 10, GREEDY)
        for _ in range(3):
            llm.engine.step()
        scheduler = llm.engine.scheduler
        scheduler.preempt(rid, "forced", "swap")
        asked = list(scheduler.blocks.ops)
        assert [op.kind for op in asked] == ["swap_out"]
        plan = scheduler.schedule(9.0)
        assert [op.kind for op in plan.ops] == ["swap_out", "swap_in"]
        scheduler.cancel(plan)
        assert scheduler.blocks.ops == asked
        done = run_bounded(llm.engine, 50)
        assert_same([done[rid]], cold_outputs([[7] * 10], GREEDY))
        assert_drained(llm.engine)


def test_the_cache_is_not_dropped_while_a_swapped_request_has_old_keys_and_values():
    """Weights change, the cache is to be dropped: what waits on the host was computed with the old ones (BM-14)."""
    with crowded(num_host_blocks=8, num_blocks=20) as llm:
        rid = llm.engine.add_request([7] * 10, GREEDY)
        for _ in range(3):
            llm.engine.step()
        llm.engine.scheduler.preempt(rid, "forced", "swap")
        assert llm.engine.reset_prefix_cache() is False
        run_bounded(llm.engine, 50)
        assert llm.engine.reset_prefix_cache() is True


def test_a_pool_made_smaller_ends_a_swapped_request_that_it_cannot_hold():
    """It would wait for ever, and everybody behind it."""
    story = Story(num_blocks=8, num_host_blocks=8, preempt_mode="swap")
    story.submit("a", 20, 8)
    story.run(3)
    story.scheduler.preempt("a", "forced", "swap")
    plan = story.scheduler.schedule(9.0)
    story.scheduler.cancel(plan)
    story.scheduler.blocks.take_ops()  # as a runner between two steps would
    story.scheduler.resize(4, story.scheduler.plan_resize(4))
    story.submit("b", 3, 2)
    plan = story.step()
    assert plan.exhausted == {"a": "its 22 tokens need 6 blocks of 4, the whole pool has 4"}
    story.run()
    assert story.ends == {"a": "length", "b": "length"}


def test_forced_recompute_beside_swaps(references):
    """Both ways of going at once, on one request too."""
    with crowded(num_host_blocks=6) as llm:
        with Recorder(llm.engine) as recording:
            rids = [llm.engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
            done = {}
            for step in range(400):
                running = llm.engine.scheduler.running
                if step % 5 == 3 and running:
                    force_preempt(llm.engine, running[-1].request_id)
                if not llm.engine.has_unfinished():
                    break
                done |= {o.request_id: o for o in llm.engine.step() if o.finished}
                llm.engine.check()
        assert modes(recording) == {"swap", "recompute"}
        assert_same([done[rid] for rid in rids], references)
        assert_drained(llm.engine)
