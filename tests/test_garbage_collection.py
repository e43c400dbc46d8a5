"""A recording does not depend on when Python collects garbage: equal seeds give equal bytes."""

import gc

import pytest
from simulated_runs import Run, random_run


@pytest.fixture
def by_hand():
    """Garbage is collected when the test says so, and only what it makes itself."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("by_hand")
def test_keys_of_ended_requests_go_at_once(monkeypatch):
    """Seed 8 uses the content of an evicted block again after its request has ended."""
    kept = random_run(8, shared=True, faults=False).to_jsonl()
    step = Run.step
    monkeypatch.setattr(Run, "step", lambda run, errors=(): (gc.collect(), step(run, errors)))
    assert random_run(8, shared=True, faults=False).to_jsonl() == kept
