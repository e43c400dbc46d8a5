"""The line that says how far something has come, and trials beside whole forks."""

import io
from types import SimpleNamespace

import pytest
from busy_runs import busy_run

from pagedinfer.sim import progress as progress_module
from pagedinfer.sim.compare import compare
from pagedinfer.sim.fork import fork
from pagedinfer.sim.progress import Progress, is_watched
from pagedinfer.sim.trials import Trials
from pagedinfer.sim.why import why
from pagedinfer.trace.metrics import lives


class Terminal(io.StringIO):
    def isatty(self):
        return True


def stderr_is(monkeypatch, out):
    """For the module alone: pytest puts its own in between setting a test up and running it."""
    monkeypatch.setattr(progress_module, "sys", SimpleNamespace(stderr=out))


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, and a clock on which every look takes a second."""
    out, now = Terminal(), iter(range(10**9))
    stderr_is(monkeypatch, out)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: float(next(now)))
    return out


def test_the_line_comes_late_and_goes(terminal):
    with Progress("Counting", "step", 5_000) as progress:
        progress(1)
        assert not terminal.getvalue()
        for _ in range(4):
            progress.step()
        assert terminal.getvalue().endswith("\rCounting: step 4 of 5,000; Ctrl-C stops it")
    assert terminal.getvalue().endswith("\r" + " " * len("Counting: step 4 of 5,000; Ctrl-C stops it") + "\r")


def test_ctrl_c_takes_the_line_away(terminal):
    def count():
        with Progress("Counting", "step") as progress:
            for _ in range(9):
                progress.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        count()
    assert terminal.getvalue().endswith(" \r")


def test_nobody_reads_a_log(monkeypatch):
    out = io.StringIO()
    stderr_is(monkeypatch, out)
    monkeypatch.setattr(progress_module, "PATIENCE", 0.0)
    with Progress("Counting", "step") as progress:
        progress(3)
    assert not out.getvalue()
    assert not is_watched()
    stderr_is(monkeypatch, None)  # as under pythonw
    assert not is_watched()


def test_what_takes_long_says_so(terminal):
    recording = busy_run(2, num_blocks=30, requests=10)
    slow = next(row["request"] for row in recording.requests.rows() if row["preemptions"])
    branch = fork(recording, 3, max_num_seqs=2)
    compare(recording, branch)
    why(recording, slow)
    told = terminal.getvalue()
    for line in (
        "Running on without the model: step ",
        "Comparing 2 runs: step ",
        "Re-simulating num_blocks=45 (1 of ",
    ):
        assert line in told


@pytest.mark.parametrize("seed", range(3))
def test_trials_beside_whole_forks(seed):
    """A trial stops where the request ends; until then it is the fork."""
    recording = busy_run(seed, num_blocks=30, requests=12)
    everyone = list(dict.fromkeys(recording.requests["request"]))
    for changes in (
        {},
        {"num_blocks": 60},
        {"max_num_seqs": 2},
        {"preempt_mode": "swap", "num_host_blocks": 30},
    ):
        whole = {life.rid: life for life in lives(fork(recording, 0, **changes).recording)}
        assert {life.rid: life for life in Trials(recording, "").everyone(changes, Progress("", ""))} == whole
        for rid in everyone[::3]:
            outcome = Trials(recording, rid).run(changes, Progress("", ""))
            life = whole[rid]
            assert (outcome.ttft, outcome.e2e, outcome.num_tokens) == (
                life.steps.ttft, life.steps.e2e, life.num_output_tokens)  # fmt: skip
            assert not outcome.refused


def test_a_trial_tells_whom_it_refuses_even_after_its_end():
    recording = busy_run(1, num_blocks=30, requests=12)
    first = recording.requests["request"][0]
    small = {"num_blocks": 7}
    refused = {event.rid for event in fork(recording, 0, **small).recording.events if event.kind == "reject"}
    outcome = Trials(recording, first).run(small, Progress("", ""))
    submits = {id(event): event.rid for event in recording.events if event.kind == "submit"}
    assert refused
    assert {submits[number] for number in outcome.refused} == refused
