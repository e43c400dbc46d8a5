"""The queues: moves, order, and their inverses."""

import pytest

from pagedinfer.config import EngineConfig
from pagedinfer.engine.queues import Queues
from pagedinfer.engine.request import Request, Status
from pagedinfer.engine.waiting import WaitingQueue, by_arrival
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.journal import Journal
from pagedinfer.memory.ops import BlockOp
from pagedinfer.trace.bus import EventBus


@pytest.fixture
def queues():
    """Four requests a, b, c, d, all waiting, over a pool of 8 blocks of 4 tokens."""
    bus = EventBus()
    config = EngineConfig(num_blocks=8, block_size=4, num_host_blocks=3)
    made = Queues(config, BlockManager(8, 4, bus), WaitingQueue(by_arrival), bus)
    made.told = []
    bus.subscribe(lambda event: made.told.append((event.kind, event.rid)))
    for rid in "abcd":
        made.add(Request(rid, 3, 10), now=0.0)
    return made


def admit(queues, rid):
    """What the scheduler does: blocks, a seat, and progress."""
    request = queues.requests[rid]
    queues._blocks.allocate(rid, request.num_tokens)
    queues.admit(request)
    request.num_computed_tokens = request.num_tokens
    return request


def order(queues):
    return "".join(r.request_id for r in queues.waiting), "".join(r.request_id for r in queues.running)


def test_requests_queue_in_order_of_arrival(queues):
    assert order(queues) == ("abcd", "")
    assert [r.arrival for r in queues.waiting] == [0, 1, 2, 3]
    assert queues.num_submitted == 4
    queues.check()


def test_admission_keeps_running_in_order_of_arrival(queues):
    for rid, expected in (("b", ("acd", "b")), ("d", ("ac", "bd")), ("a", ("c", "abd"))):
        admit(queues, rid)
        assert order(queues) == expected
        queues.check()


def test_a_preempted_request_stands_before_all_that_came_later(queues):
    for rid in "abc":
        admit(queues, rid)
    b = queues.requests["b"]
    queues.preempt(b, "recompute", "forced")
    assert order(queues) == ("bd", "ac")
    queues.preempt(queues.requests["a"], "recompute", "forced")
    queues.preempt(queues.requests["c"], "recompute", "forced")
    assert order(queues) == ("abcd", "")
    assert (b.status, b.num_computed_tokens, b.num_preemptions) == (Status.PREEMPTED, 0, 1)
    assert queues.num_preemptions == 3
    assert queues._blocks.num_free == 8
    queues.check()


def test_moves_tell_what_they_did_in_an_order_that_can_be_folded(queues):
    queues.told.clear()
    a = admit(queues, "a")
    queues.preempt(a, "recompute", "forced")
    admit(queues, "a")
    queues.end(a, "length", "10 tokens produced")
    assert queues.told == [
        ("alloc", "a"), ("admit", "a"),
        ("preempt", "a"), ("free", "a"),
        ("alloc", "a"), ("resume", "a"),
        ("free", "a"), ("finish", "a"),
    ]  # fmt: skip


@pytest.mark.parametrize("where", ["waiting", "running", "preempted"])
def test_the_end_takes_a_request_out_from_anywhere(queues, where):
    b = queues.requests["b"]
    if where != "waiting":
        admit(queues, "b")
    if where == "preempted":
        queues.preempt(b, "recompute", "forced")
    queues.end(b, "abort", "aborted by the caller")
    assert order(queues) == ("acd", "")
    assert b.status == Status.FINISHED
    assert "b" not in queues.requests
    assert queues.num_finished == 1
    assert queues._blocks.num_free == 8
    queues.check()


def test_moves_can_be_taken_back(queues):
    for rid in "abc":
        admit(queues, rid)
    queues.preempt(queues.requests["b"], "recompute", "forced")
    before = queues.snapshot() | queues._blocks.snapshot()
    journal = queues._blocks.journal = Journal()
    queues.preempt(queues.requests["c"], "recompute", "forced")
    queues.preempt(queues.requests["a"], "recompute", "forced")
    admit(queues, "b")
    queues._blocks.journal = None
    assert order(queues) == ("acd", "b")
    queues.requests["b"].num_computed_tokens = 0  # the scheduler takes its own part back first
    journal.undo()
    assert queues.snapshot() | queues._blocks.snapshot() == before
    queues.check()


def test_a_swapped_request_keeps_what_it_computed_and_comes_back_elsewhere(queues):
    a, blocks = admit(queues, "a"), queues._blocks
    admit(queues, "b")
    before = queues.snapshot() | blocks.snapshot()
    journal = blocks.journal = queues.host.journal = Journal()
    queues.preempt(a, "swap", "forced")
    assert (a.status, a.num_computed_tokens, queues.host_tables) == (Status.SWAPPED, 3, {"a": (0,)})
    assert (order(queues), queues.swapped) == (("cd", "b"), [a])
    queues.swap_in(a, blocks.restore("a", 3, 8))
    assert (order(queues), queues.swapped, queues.host_tables) == (("cd", "ab"), [], {})
    assert blocks.table("a") == [2]
    assert blocks.take_ops() == [BlockOp("swap_out", ((0, 0),)), BlockOp("swap_in", ((0, 2),))]
    blocks.journal = queues.host.journal = None
    queues.check()
    journal.undo()
    assert queues.snapshot() | blocks.snapshot() == before


def test_swapping_without_room_on_the_host_is_recompute(queues):
    queues.requests["a"].num_tokens = 13  # 4 blocks, and the host has 3 slots
    a = admit(queues, "a")
    queues.preempt(a, "swap", "forced")
    assert (a.status, a.num_computed_tokens, queues.host.num_free) == (Status.PREEMPTED, 0, 3)
    queues.check()


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda q: q.running.append(q.requests["b"]), "in two queues, or in none"),
        (lambda q: q.waiting.remove(q.requests["b"]), "in two queues, or in none"),
        (lambda q: admit(q, "b") and q.running.reverse(), "out of order"),
        (lambda q: q._blocks.free("a", "finish"), "holds 0 blocks for 3 tokens"),
        (lambda q: q._blocks.allocate("b", 4), "holds 1 blocks for 0 tokens"),
        (lambda q: q._blocks.allocate("ghost", 4), "has ended holds blocks"),
        (lambda q: setattr(q.requests["a"], "num_computed_tokens", 4), "does not have"),
        (lambda q: setattr(q.requests["a"], "status", Status.PREEMPTED), "wrong queue"),
        (lambda q: setattr(q.requests["b"], "num_tokens", 14), "went past max_tokens"),
        (
            lambda q: setattr(q, "_config", EngineConfig(num_blocks=8, max_num_seqs=1)) or admit(q, "b"),
            "more requests run",
        ),
    ],
)
def test_check_notices(queues, spoil, what):
    admit(queues, "a")
    queues.check()
    spoil(queues)
    with pytest.raises(AssertionError, match=what):
        queues.check()


def test_a_request_shows_itself():
    request = Request("<a>", 3, 10)
    request.append([7, 8])
    assert repr(request) == "Request(<a>, waiting, prompt 3, output 2 of 10, computed 0 of 5)"
    assert request.token_ids == []  # it carries lengths only
    assert "&lt;a&gt;" in request._repr_html_()
    assert (request.num_output_tokens, request.num_pending_tokens) == (2, 5)
