"""Host slots: handed out first freed first, kept for an open plan, and taken back exactly."""

import random

import pytest

from pagedinfer.memory.journal import Journal
from pagedinfer.memory.tiers import HostTier


def test_slots_go_round_first_freed_first():
    tier = HostTier(4)
    assert tier.allocate(3) == (0, 1, 2)
    tier.free((1,))
    tier.free((0,))
    assert tier.num_free == 3
    assert tier.allocate(3) == (3, 1, 0)
    assert tier.snapshot() == {"free": [], "released": []}
    tier.check()


@pytest.mark.parametrize("num_slots", [0, 1, 2])
def test_a_tier_too_small_says_no_and_changes_nothing(num_slots):
    """OF-04: pools of 0, 1 and too few."""
    tier = HostTier(num_slots)
    before = tier.snapshot()
    assert tier.allocate(num_slots + 1) is None
    assert tier.snapshot() == before
    assert tier.allocate(0) == ()
    assert tier.allocate(num_slots) == tuple(range(num_slots))
    assert tier.num_free == 0
    tier.check()


def test_a_slot_that_an_open_plan_reads_is_not_handed_out_before_its_commit():
    """OF-02: the next owner's bytes must not come before the plan that reads the old ones is over."""
    tier = HostTier(2)
    tier.allocate(2)
    tier.journal = first = Journal()
    tier.free((0,))
    assert tier.num_free == 0
    assert tier.allocate(1) is None
    tier.journal = second = Journal()  # the next step is planned while the first runs
    tier.free((1,))
    tier.journal = None
    tier.check()
    tier.settle(first)
    assert tier.snapshot() == {"free": [0], "released": [1]}
    second.undo()
    assert tier.snapshot() == {"free": [0], "released": []}
    assert tier.allocate(2) is None  # 1 is in use again
    tier.check()


def test_freeing_twice_or_what_is_free_is_our_own_fault():
    tier = HostTier(2)
    tier.allocate(1)
    for slots in [(1,), (0, 0), (0, 1)]:
        with pytest.raises(AssertionError, match="are freed"):
            tier.free(slots)
    tier.free((0,))
    with pytest.raises(AssertionError):
        tier.free((0,))
    tier.check()


def test_check_sees_a_slot_that_is_lost():
    tier = HostTier(3)
    tier._free.pop()
    with pytest.raises(AssertionError, match="of 3 host slots"):
        tier.check()


@pytest.mark.parametrize("seed", range(20))
def test_undo_restores_exactly(seed):
    draw = random.Random(seed)
    tier, held = HostTier(draw.randrange(8)), []
    for _ in range(60):
        before, was_held = tier.snapshot(), list(held)
        tier.journal = journal = Journal()
        for _ in range(draw.randrange(5)):
            if draw.random() < 0.6:
                slots = tier.allocate(draw.randrange(4))
                held += [slots] if slots else []
            elif held:
                tier.free(held.pop(draw.randrange(len(held))))
            tier.check()
        tier.journal = None
        if draw.random() < 0.5:
            journal.undo()
            held = was_held
            assert tier.snapshot() == before
        else:
            tier.settle(journal)
            assert tier.snapshot()["released"] == []
        tier.check()
    for slots in held:
        tier.free(slots)
    assert sorted(tier.snapshot()["free"]) == list(range(tier.num_slots))
