"""The block manager under random calls, beside a slow twin that knows which token each slot of the pool holds.

The twin is a dict from slot to content: a token with all that come before it. It carries out block operations, writes
what a request computes, and after each call every request must find its own tokens where its table says, every cached
block what its key stands for, and the snapshot what the twin reckons.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagedinfer.errors import OutOfBlocks
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.keys import KeyTable
from pagedinfer.memory.prefix import PINNED
from pagedinfer.testing import unused_blocks
from pagedinfer.trace.bus import EventBus

STEMS = ([0] * 12, [0] * 5 + [1] * 7, [1] * 12)
TOKENS = st.builds(lambda stem, number: stem[:number], st.sampled_from(STEMS), st.integers(1, 12))
WISHES = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.integers(4, 12),
        st.sampled_from([0, 50, 90, PINNED]),
        st.sampled_from([-1, 1, 3]),
    ),
    max_size=2,
)
RIDS = "abcdef"


class Twin:
    """One request as the twin sees it: its tokens, how many are written, its keys, and its published blocks."""

    def __init__(self, tokens):
        self.tokens, self.written, self.keys, self.published = list(tokens), 0, [], 0

    def copy(self):
        twin = Twin(self.tokens)
        twin.written, twin.keys, twin.published = self.written, list(self.keys), self.published
        return twin


class MemoryMachine(RuleBasedStateMachine):
    """Requests come, share, fork, grow, publish and go; plans are made and taken back; the pool changes its size."""

    @initialize(num_blocks=st.integers(3, 9), size=st.integers(1, 3))
    def start(self, num_blocks, size):
        self.blocks, self.size = BlockManager(num_blocks, size, EventBus()), size
        self.table = KeyTable()
        self.live = {}
        self.slots = {}  # (block, offset) -> the token and all before it
        self.names = {}  # key id -> the tokens that it stands for
        self.saved = None  # (snapshot, requests, slots) when the open journal began
        self.now = 0.0

    # -- what the twin reckons ------------------------------------------------------------------------------------

    @property
    def planning(self):
        return self.saved is not None

    def for_hire(self):
        """Blocks that may be taken, in order."""
        snapshot = self.blocks.snapshot()
        pinned = snapshot["idle"].get(str(PINNED), [])
        return [block for block in unused_blocks(snapshot) if block not in pinned]

    def found(self, tokens):
        """Full blocks that a look-up must find: they are written, cached, and not the last token's."""
        cached = {self.names[key] for _, key in self.blocks.snapshot()["cached"].values()}
        limit = (len(tokens) - 1) // self.size
        return next((i for i in range(limit) if tuple(tokens[: (i + 1) * self.size]) not in cached), limit)

    def extend_keys(self, twin, upto):
        known = twin.tokens[:upto]
        self.table.extend(twin.keys, None, known, self.size)
        for i, key in enumerate(twin.keys):
            self.names[key.id] = tuple(known[: (i + 1) * self.size])

    def carry_out(self):
        for op in self.blocks.take_ops():
            for source, to in op.pairs:
                moved = {o: self.slots.get((source, o)) for o in range(self.size)}
                self.slots.update({(to, o): content for o, content in moved.items()})

    def write(self, rid, end):
        """The request computes up to `end`: into blocks that it alone holds."""
        twin, table = self.live[rid], self.blocks.table(rid)
        snapshot = self.blocks.snapshot()
        for position in range(twin.written, end):
            block = table[position // self.size]
            assert snapshot["ref_counts"][str(block)] == 1, f"block {block} is written and shared"
            assert str(block) not in snapshot["cached"], f"block {block} is written and cached"
            self.slots[block, position % self.size] = tuple(twin.tokens[: position + 1])
        twin.written = end

    def needed(self, rid, end):
        """Blocks that the request lacks to write from where it is up to `end`: new ones, and a copy."""
        table, first = self.blocks.table(rid), self.live[rid].written // self.size
        snapshot = self.blocks.snapshot()
        shared = first < len(table) and (
            snapshot["ref_counts"][str(table[first])] > 1 or str(table[first]) in snapshot["cached"]
        )
        return max(0, -(-end // self.size) - len(table)) + shared

    def allocate(self, rid, end, refused):
        """Grow and write; or, refused for want of blocks or by injection, change nothing. Returns whether it grew."""
        needed, free, start = self.needed(rid, end), self.for_hire(), self.live[rid].written
        before = self.blocks.snapshot()
        if refused:
            self.blocks.refuse_calls.add(self.blocks.num_calls)
        if needed > len(free) or (refused and needed):
            mark = len(self.blocks.journal) if self.planning else 0
            with pytest.raises(OutOfBlocks) as caught:
                self.blocks.allocate(rid, end, start=start)
            self.blocks.refuse_calls.clear()
            assert (caught.value.needed, caught.value.free) == (needed, len(free))
            assert self.blocks.snapshot() == before
            assert not self.planning or len(self.blocks.journal) == mark
            return False
        taken = self.blocks.allocate(rid, end, start=start)
        self.blocks.refuse_calls.clear()
        assert list(taken) == free[:needed], "too many blocks, or in another order"
        self.carry_out()
        self.write(rid, end)
        return True

    # -- requests -------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.live) < len(RIDS))
    @rule(tokens=TOKENS)
    def admit_whole(self, tokens):
        self.admit(tokens, len(tokens), False)

    @precondition(lambda self: len(self.live) < len(RIDS))
    @rule(tokens=TOKENS, chunk=st.integers(1, 12), refused=st.booleans())
    def admit(self, tokens, chunk, refused):
        rid = next(rid for rid in RIDS if rid not in self.live)
        twin = Twin(tokens)
        self.extend_keys(twin, len(tokens))
        found, before = self.found(tokens), self.blocks.snapshot()
        assert self.blocks.num_cached(twin.keys, len(tokens)) == found * self.size
        shared = [
            b for b, (_, key) in before["cached"].items() if self.names[key] in self.prefixes(tokens, found)
        ]
        free = self.for_hire()
        room = len(free) - sum(int(block) in free for block in shared)
        lacking = -(-len(tokens) // self.size) - found
        why = self.blocks.shortage(twin.keys, len(tokens), len(tokens), 0)
        assert (why is None) == (lacking <= room), f"{why}: {lacking} blocks beside {found}, {room} free"
        if why is not None:
            assert f"{room} free" in why
            return
        cached, note = self.blocks.attach(rid, twin.keys, len(tokens))
        assert cached == found * self.size < len(tokens), note
        self.live[rid], twin.written, twin.published = twin, cached, found
        if not self.allocate(rid, min(len(tokens), cached + chunk), refused) and not self.blocks.table(rid):
            del self.live[rid]

    def prefixes(self, tokens, number):
        return {tuple(tokens[: (i + 1) * self.size]) for i in range(number)}

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        refused=st.sampled_from([False, False, True]),
    )
    def grow(self, data, more, refused):
        rid = data.draw(st.sampled_from(sorted(self.live)))
        twin = self.live[rid]
        if len(twin.tokens) < 24:
            twin.tokens += more
        end = data.draw(st.integers(twin.written, len(twin.tokens)))
        if end > twin.written:
            self.allocate(rid, end, refused)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), last=st.integers(2, 3))
    def fork(self, data, last):
        parent = data.draw(st.sampled_from(sorted(self.live)))
        written = self.live[parent].written
        rid = next((rid for rid in RIDS if rid not in self.live), None)
        if rid is None or not written:
            return
        shared = data.draw(st.integers(1, written))
        twin = self.live[parent].copy()
        twin.tokens = [*twin.tokens[:shared], last]
        twin.written, twin.keys = shared, twin.keys[: shared // self.size]
        twin.published = min(twin.published, shared // self.size)
        self.blocks.fork(parent, rid, shared)
        self.live[rid] = twin
        if shared < written and not self.allocate(rid, shared + 1, False):  # parted at once, or not at all
            del self.live[rid]
            self.blocks.free(rid, "preempt")

    @precondition(lambda self: self.live and not self.planning)
    @rule(data=st.data(), wishes=WISHES, is_first=st.booleans())
    def publish(self, data, wishes, is_first):
        self.publish_one(data.draw(st.sampled_from(sorted(self.live))), wishes, is_first)

    def publish_one(self, rid, wishes, is_first):
        twin, before = self.live[rid], self.blocks.snapshot()
        self.extend_keys(twin, len(twin.tokens))
        retain = [(a, b, p, until if until < 0 else self.now + until) for a, b, p, until in wishes]
        self.blocks.publish(rid, twin.keys, twin.written, retain, is_first=is_first)
        after = self.blocks.snapshot()
        assert before["cached"].items() <= after["cached"].items()
        assert (before["free"], before["idle"]) == (after["free"], after["idle"])
        cached = {self.names[key] for _, key in after["cached"].values()}
        new = self.prefixes(twin.tokens, twin.written // self.size) - self.prefixes(
            twin.tokens, twin.published
        )
        assert new <= cached  # what was published before may be gone: another block held it
        twin.published = twin.written // self.size
        assert len(cached) == len(after["cached"]), "two blocks are cached for the same tokens"

    @precondition(lambda self: self.live and not self.planning)
    @rule(data=st.data())
    def trim(self, data):
        """Guessed tokens did not come true: their blocks go back, if they are the request's own."""
        rid = data.draw(st.sampled_from(sorted(self.live)))
        twin, table, snapshot = self.live[rid], list(self.blocks.table(rid)), self.blocks.snapshot()
        low = max(1, twin.published * self.size)
        keep = data.draw(st.integers(low, twin.written)) if twin.written >= low else 0
        gone = table[-(-keep // self.size) :]
        own = all(snapshot["ref_counts"][str(b)] == 1 and str(b) not in snapshot["cached"] for b in gone)
        if not keep or not own:
            return
        self.blocks.trim(rid, keep)
        twin.written = keep
        twin.tokens[keep:] = [2]
        twin.keys = twin.keys[: keep // self.size]
        assert self.for_hire()[: len(gone)] == gone
        if not keep:
            del self.live[rid]

    @precondition(lambda self: len(self.live) > 2 or (self.live and self.planning))
    @rule(data=st.data())
    def free(self, data):
        rid = data.draw(st.sampled_from(sorted(self.live)))
        table, before = list(self.blocks.table(rid)), self.blocks.snapshot()
        del self.live[rid]
        freed = self.blocks.free(rid, "finish")
        assert list(freed) == [b for b in reversed(table) if before["ref_counts"][str(b)] == 1]
        plain = [b for b in freed if str(b) not in before["cached"]]
        assert self.blocks.snapshot()["free"] == [*before["free"], *plain]

    # -- plans ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.planning)
    @rule()
    def begin_a_plan(self):
        self.saved = (
            self.blocks.snapshot(), {rid: twin.copy() for rid, twin in self.live.items()}, dict(self.slots), self.now,
        )  # fmt: skip
        self.blocks.journal = Journal()

    @precondition(lambda self: self.planning)
    @rule(cancelled=st.booleans(), wishes=WISHES)
    def end_a_plan(self, cancelled, wishes=()):
        journal, self.blocks.journal = self.blocks.journal, None
        overwritten = self.blocks.take_overwritten()
        (snapshot, live, slots, now), self.saved = self.saved, None
        if not cancelled:
            for rid in self.live:
                self.publish_one(rid, wishes, True)
            return
        journal.undo()
        assert self.blocks.snapshot() == snapshot, "cancelled, the plan left something behind"
        self.live, self.now = live, now
        for block in overwritten:  # the runner gives these back, and no others
            self.slots.update({(block, o): slots.get((block, o)) for o in range(self.size)})

    # -- time, size, and the cache as a whole ---------------------------------------------------------------------

    @rule(what=st.sampled_from([*"eeee", *"rrrr", "p", "p", "c"]), number=st.integers(1, 10))
    def keep_house(self, what, number):
        """Expire, resize, release pins, or clear the cache: seldom, so that there is something to lose."""
        if what == "e":
            self.expire()
        elif what == "p":
            self.release_pins()
        elif not self.planning:
            self.resize(number) if what == "r" else self.reset()

    def expire(self):
        self.now += 1.0
        before = self.blocks.snapshot()
        ended = {b for b, (_, until) in before["retained"].items() if 0 <= until <= self.now}
        self.blocks.expire(self.now)
        after = self.blocks.snapshot()
        assert after["retained"] == {b: how for b, how in before["retained"].items() if b not in ended}
        assert after["cached"] == before["cached"]
        idle = [b for blocks in after["idle"].values() for b in blocks]
        assert sorted(idle) == sorted(b for blocks in before["idle"].values() for b in blocks)

    def release_pins(self):
        before = self.blocks.snapshot()
        pinned = [b for b, (priority, _) in before["retained"].items() if priority == PINNED]
        assert self.blocks.release_pins() == bool(pinned)
        after = self.blocks.snapshot()
        assert str(PINNED) not in after["idle"]
        waiting = before["idle"].get(str(PINNED), [])
        assert after["idle"].get("50", []) == [*before["idle"].get("50", []), *waiting], (
            "chains lost their order"
        )

    def resize(self, num_blocks):
        before = self.blocks.snapshot()
        held = len(before["ref_counts"])
        if held > num_blocks:
            with pytest.raises(OutOfBlocks):
                self.blocks.plan_resize(num_blocks)
            assert self.blocks.snapshot() == before
            return
        ops = self.blocks.plan_resize(num_blocks)
        moves = [pair for op in ops for pair in op.pairs]
        assert all(source >= num_blocks > to for source, to in moves)
        for source, to in moves:
            self.slots.update({(to, o): self.slots.get((source, o)) for o in range(self.size)})
        self.blocks.resize(num_blocks, ops)
        assert self.blocks.num_blocks == num_blocks
        self.slots = {slot: content for slot, content in self.slots.items() if slot[0] < num_blocks}

    def reset(self):
        before = self.blocks.snapshot()
        assert self.blocks.reset_prefix_cache("told to") == (not before["ref_counts"])
        assert self.blocks.snapshot()["cached"] == (before["cached"] if before["ref_counts"] else {})

    # -- always ---------------------------------------------------------------------------------------------------

    @invariant()
    def everybody_reads_what_is_theirs(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        snapshot = self.blocks.snapshot()
        assert snapshot["block_tables"].keys() == {r for r, twin in self.live.items() if self.blocks.table(r)}
        for rid, twin in self.live.items():
            table = self.blocks.table(rid)
            assert len(table) == -(-twin.written // self.size)
            for position in range(twin.written):
                slot = table[position // self.size], position % self.size
                assert self.slots.get(slot) == tuple(twin.tokens[: position + 1]), f"{rid} reads {slot}"
        for block, (_, key) in snapshot["cached"].items():
            name = self.names[key]
            held = [self.slots.get((int(block), o)) for o in range(self.size)]
            assert held == [name[: len(name) - self.size + o + 1] for o in range(self.size)], (
                f"cached block {block}"
            )
        assert self.blocks.num_free == len(self.for_hire())

    def teardown(self):
        if hasattr(self, "blocks"):
            if self.planning:
                self.end_a_plan(True)
            for rid in list(self.live):
                self.blocks.free(rid, "finish")
            assert len(unused_blocks(self.blocks.snapshot())) == self.blocks.num_blocks
            assert self.blocks.reset_prefix_cache("the end")
            self.blocks.check()


@pytest.mark.parametrize(
    ("examples", "steps"), [(200, 50), pytest.param(600, 80, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_random_calls(examples, steps):
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            print_blob=True,
        ),
    )


def test_retention_that_came_back_with_a_cancel_still_ends():
    """Found by the machine: evicted in a plan, its end looked at in the next, both cancelled: it was kept for ever."""
    blocks = BlockManager(1, 1, EventBus())
    table, keys = KeyTable(), []
    table.extend(keys, None, [7, 8], 1)
    blocks.allocate("a", 1)
    blocks.publish("a", keys, 1, [(0, 1, 0, 5.0)])
    blocks.free("a", "finish")
    first, second = Journal(), Journal()
    blocks.journal = first
    blocks.allocate("b", 1)
    blocks.journal = second
    blocks.expire(9.0)
    second.undo()
    first.undo()
    blocks.journal = None
    blocks.check()
    blocks.expire(9.0)
    assert blocks.snapshot()["retained"] == {}
