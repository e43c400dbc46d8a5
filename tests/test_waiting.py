"""The waiting queue beside its slow twin: a list that is sorted for every question."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.engine.request import Request
from pagedinfer.engine.waiting import WaitingQueue, by_arrival


def request(number, priority=0, tenant=""):
    made = Request(f"r{number}", 3, 4, priority=priority, tenant=tenant)
    made.arrival = number
    return made


def ids(requests):
    return [r.request_id for r in requests]


def test_the_order_is_the_keys_and_equal_keys_go_by_arrival():
    queue = WaitingQueue(lambda r: (r.priority,))
    for number, priority in enumerate((5, 1, 5, 0)):
        queue.add(request(number, priority))
    assert ids(queue.in_order()) == ["r3", "r1", "r0", "r2"]
    assert ids(queue.in_order()) == ["r3", "r1", "r0", "r2"]  # asking changes nothing


def test_shown_it_goes_by_priority_and_arrival_whatever_the_key():
    queue = WaitingQueue(lambda r: (-r.arrival,))
    for number, priority in enumerate((5, 1, 5, 0)):
        queue.add(request(number, priority))
    assert ids(queue.in_order()) == ["r3", "r2", "r1", "r0"]
    assert ids(queue) == ["r3", "r1", "r0", "r2"]
    assert queue[1].request_id == "r1"
    assert len(queue) == 4


@pytest.mark.parametrize(("moving", "expected"), [(False, ["r0", "r1"]), (True, ["r1", "r0"])])
def test_keys_that_move_are_asked_for_again_and_others_are_not(moving, expected):
    worth = {"r0": 1, "r1": 2}
    queue = WaitingQueue(lambda r: (worth[r.request_id],), moving)
    for number in range(2):
        queue.add(request(number))
    worth["r0"] = 3
    queue.refresh()
    assert ids(queue.in_order()) == expected


def test_closing_a_tenant_on_the_way_leaves_its_others_out():
    queue, closed, seen = WaitingQueue(lambda r: (r.arrival,), by_tenant=True), set(), []
    for number, tenant in enumerate("aabab"):
        queue.add(request(number, tenant=tenant))
    for waiting in queue.in_order(closed):
        seen.append(waiting.request_id)
        if waiting.request_id == "r1":
            closed.add("a")
    assert seen == ["r0", "r1", "r2", "r4"]
    assert ids(queue.in_order()) == ["r0", "r1", "r2", "r3", "r4"]


CALLS = st.tuples(
    st.sampled_from(["add", "add", "remove", "put_back", "walk", "walk", "refresh"]), st.integers(0, 9)
)


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("by_tenant", [False, True])
@settings(max_examples=150, derandomize=True, database=None, deadline=None)
@given(calls=st.lists(CALLS, max_size=60), keys=st.lists(st.integers(0, 3), min_size=10, max_size=10))
def test_equals_a_sorted_list(moving, by_tenant, calls, keys):
    worth = list(keys)
    everybody = [request(number, priority=keys[-number], tenant="abc"[number % 3]) for number in range(10)]
    queue = WaitingQueue(lambda r: (worth[r.arrival],), moving, by_tenant)
    model = {}  # waiting request -> its key as last asked for

    def in_order():
        return sorted(model, key=lambda r: (model[r], r.arrival))

    for name, number in calls:
        who = everybody[number]
        if name in ("add", "put_back") and who not in model:
            if name == "put_back" and who.order_key is None:
                continue  # it never waited
            getattr(queue, name)(who)
            model[who] = (worth[number],) if name == "add" else who.order_key
        elif name == "remove" and who in model:
            queue.remove(who)
            del model[who]
        elif name == "refresh":
            worth[number] = (worth[number] + 2) % 4
            queue.refresh()
            if moving:
                model = {r: (worth[r.arrival],) for r in model}
        elif name == "walk":  # as a scheduler does: some of those who come up are admitted, then it stops
            expected = in_order()[: number + 1]
            seen = []
            walk = queue.in_order()
            for waiting in walk:
                seen.append(waiting)
                if (waiting.arrival + number) % 3 == 0:
                    queue.remove(waiting)
                    del model[waiting]
                if len(seen) == number + 1:
                    break
            walk.close()
            assert seen == expected
        assert list(queue.in_order()) == in_order()
        assert list(queue) == sorted(model, key=by_arrival)
        assert len(queue) == len(model)
        assert [r in queue for r in everybody] == [r in model for r in everybody]


def test_entries_of_those_who_left_do_not_pile_up():
    queue = WaitingQueue(lambda r: (0,))
    stays = request(0)
    queue.add(stays)
    for number in range(1, 2000):
        passing = request(number)
        queue.add(passing)
        queue.remove(passing)
        assert list(queue.in_order()) == [stays]
    assert sum(map(len, queue._heaps.values())) < 50
