"""Notebook 08's checks pass what is right and refuse, in words that help, what a learner may come up with."""

import subprocess
import sys

import pytest

from pagedinfer.course import bundled_prompts, bundled_recording, check, exercises
from pagedinfer.course.eviction import eviction_run
from pagedinfer.course.sharing import GOAL, SEEDS, copies_of
from pagedinfer.errors import ConfigError
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.ops import BlockOp
from pagedinfer.sim.rerun import rerun
from pagedinfer.trace.events import Copy

# -- the recording ----------------------------------------------------------------------------------------------------


def test_recording_is_what_this_engine_does():
    """A change of the scheduler? Then run notebooks/record.py again."""
    recording = bundled_recording("shared_prompt")
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)
    assert len(recording.to_jsonl(wall=False)) < 30_000


def test_recording_holds_what_the_notebook_says():
    recording, prompts = bundled_recording("shared_prompt"), bundled_prompts("shared_prompt")
    state = recording.at(18)
    assert [state.ref_counts[block_id] for block_id in range(5)] == [5] * 5
    assert prompts["r0"][:44] == prompts["r1"][:44]
    assert prompts["r0"][44] != prompts["r1"][44]
    assert prompts["r1"] == prompts["r3"]
    assert {row["request"]: row["prompt_tokens"] for row in recording.requests.rows()} == {
        rid: len(tokens) for rid, tokens in prompts.items()
    }
    with pytest.raises(ConfigError, match="eight_requests"):
        bundled_prompts("eight_requests")


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ((44, 48), "only whole blocks"),  # token by token
        ((48, 48), "up to the first block that differs"),  # rounded up
        ((52, 48), "block by block"),
        ((40, 40), "not only the blocks of r0"),
        ((40, 54), "only full blocks are cached"),
        ((40, 53), "only full blocks are cached"),
        ((40, 56), "which blocks are full"),
        ((None, 48), "r1: not None"),
    ],
)
def test_wrong_cache_predictions(answers, says):
    verdict = check("08.1", *answers)
    assert verdict.mark == "✗"
    assert says in repr(verdict)


@pytest.mark.parametrize(
    ("copies", "says"),
    [
        ((4, 4, 4), "filled that block itself"),
        ((3, 0, 0), "prompt's last token itself"),
        ((3, 3, 3), "share 16 tokens"),
        ((0, 0, 0), "partly filled"),
        ((3, 3), "Give 3 numbers"),
        (3, "Give 3 numbers"),
        ([3, 3, 0, 0], "Give 3 numbers"),
    ],
)
def test_wrong_copy_predictions(copies, says):
    verdict = check("08.2", copies)
    assert verdict.mark == "✗"
    assert says in repr(verdict)


def test_dots_are_no_answer():
    assert check("08.1", 40, ...).mark == "…"
    assert check("08.2", (..., ..., ...)).mark == "…"
    assert "Replace the ... of copies" in repr(check("08.2", (3, ..., 0)))


def test_copies_come_from_the_engine():
    assert [copies_of(length, 4) for length in (13, 16, 17)] == [3, 3, 0]
    assert copies_of(13, 1) == 0


# -- the fault --------------------------------------------------------------------------------------------------------


def manager(code):
    names = {"BlockManager": BlockManager, "BlockOp": BlockOp, "Copy": Copy}
    exec(code, names)
    return names["Mended"]


RIGHT = exercises()["08.3"].code
JOURNAL = "self.journal.record(lambda: table.__setitem__(logical, old))"


@pytest.mark.parametrize(
    ("line", "instead", "says"),
    [
        ('"copy", ((old, new),)', '"copy", ((new, old),)', "which holds nothing"),  # the planted fault
        ('self.ops.append(BlockOp("copy", ((old, new),)))', "pass", "which holds nothing"),
        ("self.pool.drop(old)", "pass", "The books do not add up"),
        ("self.pool.drop(old)", "self.pool.drop(new)", "The books do not add up"),
        ("old, table[logical] = table[logical], new", "old = table[logical]", "both written to slot"),
        (JOURNAL, "pass", "must be told to the journal"),
        ("self._bus.emit(Copy(rid, group, logical, ((old, new),)))", "pass", "is the event there"),
        ("Copy(rid, group, logical, ((old, new),))", "Copy(rid, group, logical, ((new, old),))", "is the event right"),
        ("self.pool.drop(old)", "raise ValueError('no')", "raised ValueError: no"),
        ("self.pool.drop(old)", "raise SystemExit(3)", "raised SystemExit: 3"),
    ],
)  # fmt: skip
def test_wrong_mends(line, instead, says):
    assert line in RIGHT
    verdict = check("08.3", manager(RIGHT.replace(line, instead)))
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_a_stub_or_no_class():
    assert (
        check("08.3", manager(RIGHT.replace("self.pool.drop(old)", "raise NotImplementedError"))).mark == "…"
    )
    assert "made from BlockManager" in repr(check("08.3", lambda *arguments: None))
    assert "made from BlockManager" in repr(check("08.3", dict))


# -- the rule ---------------------------------------------------------------------------------------------------------


def stub(idle):
    raise NotImplementedError


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (lambda idle: idle[0], "no better than the least recently used"),
        (lambda idle: idle[-1], "the goal is 80%"),
        (lambda idle: max(idle, key=lambda block: block.hits), "the goal is 80%"),
        (lambda idle: max(idle, key=lambda block: block.position), "the goal is 80%"),
        (lambda idle: idle[0].position, "gave no block that could go"),
        (lambda idle: None, "chose None"),
        (lambda idle: idle[99], "IndexError"),
        (lambda idle: sys.exit(3), "it left with SystemExit"),
        ("evict", "wants your function"),
    ],
)
def test_wrong_rules(rule, says):
    verdict = check("08.4", rule)
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


def test_a_rule_may_name_the_block_and_a_stub_is_no_answer():
    assert check("08.4", lambda idle: min(idle, key=lambda block: block.hits).block_id)
    assert check("08.4", stub).mark == "…"


@pytest.mark.parametrize("seed", [1, *SEEDS])
def test_the_goal_is_far_from_the_default_and_within_reach(seed):
    default = eviction_run(lambda idle: idle[0], seed).found
    better = eviction_run(lambda idle: min(idle, key=lambda block: (block.hits, block.last_used)), seed)
    assert default < GOAL - 0.15
    assert better.found > GOAL + 0.1
    assert not better.recording.errors


def test_idle_blocks_are_what_the_prefix_tree_says():
    """Hits and positions that a rule sees, against the view's own way of counting."""
    from pagedinfer.views.prefix_cache import prefix_caches

    seen = set()

    def rule(idle):
        seen.update((block.block_id, block.hits) for block in idle)
        return idle[0]

    recording = eviction_run(rule, 1).recording
    told = {
        (prefix.block_id, prefix.hits)
        for cache in prefix_caches(recording)
        for prefix in cache.prefixes.values()
    }
    assert seen <= told
    assert max(hits for _, hits in seen) > 2


def test_notebook_08_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer.course import check, exercises\n"
        "names = {}; exec(exercises()['08.4'].code, names)\n"
        "assert check('08.4', names['evict']) and check('08.1', 40, 48) and check('08.2', (3, 3, 0))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
