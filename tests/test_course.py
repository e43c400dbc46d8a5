"""Checks judge behaviour: each passes its own solution, and refuses plausible wrong answers in words that help."""

import subprocess
import sys

import pytest

import pagedinfer.course as course
from pagedinfer.config import EngineConfig
from pagedinfer.course import bundled_recording, bundled_texts, check, exercises, hint, reveal
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, OutOfBlocks
from pagedinfer.memory.blocks import BlockManager
from pagedinfer.memory.ops import BlockOp
from pagedinfer.session import Session
from pagedinfer.sim.fork import fork
from pagedinfer.sim.rerun import rerun
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import Copy

CAUSE = "r0 needs 1 block, 0 free"


def solution(exercise_id):
    """What a learner's notebook holds after running the code that `reveal` shows."""
    known = (OutOfBlocks, BlockManager, BlockOp, Copy, Policy, fork)
    names = {kind.__name__: kind for kind in known}
    exec(exercises()[exercise_id].code, names)
    return names


@pytest.fixture(scope="module")
def session():
    """The run of notebook 01, on the tiny model: the same lengths give the same tables."""
    from pagedinfer.llm import LLM

    with LLM("tiny", block_size=8, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        session = Session(llm)
        for length, tokens in ((20, 12), (13, 12), (6, 10)):
            prompt = {"prompt_token_ids": list(range(1, length + 1))}
            session.submit(prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True)
        while session.recording.last_step < 8:
            session.advance()
        yield session


@pytest.fixture(scope="module")
def stopped():
    """The run of notebook 07, to its end."""
    limits = {"num_blocks": 16, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    session = Session(Engine(EngineConfig(**limits, enable_prefix_caching=False), SimulatedRunner()))
    for length in (6, 5, 9):
        session.submit({"prompt_token_ids": list(range(length))}, max_tokens=20, detokenize=False)
    session.run()
    return session


# -- every exercise passes with what `reveal` shows -------------------------------------------------------------------


def test_solutions_pass(session, stopped):
    answers = {
        "00.1": lambda s: [s["prediction"]],
        "00.2": lambda s: [s["step"], s["victim"], s["cause"]],
        "00.3": lambda s: [s["first_preemption"]],
        "01.1": lambda s: [s["prediction"], session],
        "01.2": lambda s: [s["slot_mapping"], session],
        "01.3": lambda s: [s["append_token"]],
        "02.1": lambda s: [s["empty"]],
        "02.2": lambda s: [s["holes"], s["fits"]],
        "02.3": lambda s: [s["best_fit"]],
        "02.4": lambda s: [s["moved"], s["first"]],
        "03.1": lambda s: [s["static"], s["continuous"]],
        "03.2": lambda s: [s["StaticBatching"]],
        "03.3": lambda s: [s["share_served_well"]],
        "03.4": lambda s: [s["MyAdmission"]],
        "07.1": lambda s: [s["prediction"], stopped],
        "07.2": lambda s: [s["lost_again"]],
        "07.3": lambda s: [s["prediction"], stopped],
        "07.4": lambda s: [s["smallest_pool"]],
        "08.1": lambda s: [s["r1"], s["r3"]],
        "08.2": lambda s: [s["copies"]],
        "08.3": lambda s: [s["Mended"]],
        "08.4": lambda s: [s["evict"]],
        **{f"10.{n}": lambda s: [s["cause"], s["steps"], s["change"]] for n in (1, 2, 3, 4)},
        "10.5": lambda s: [s["diagnose"]],
    }
    assert answers.keys() == exercises().keys()
    for exercise_id, pick in answers.items():
        verdict = check(exercise_id, *pick(solution(exercise_id)))
        assert verdict, verdict
        assert repr(verdict).startswith("✓")
        assert "passed" in verdict.heading


def test_slots_pass_without_an_engine():
    assert check("01.2", solution("01.2")["slot_mapping"])


# -- plausible wrong answers ------------------------------------------------------------------------------------------


def last_preemption(recording):
    found = None
    for event in recording.events:
        if event.kind == "preempt":
            found = event.step, event.rid
    return found


def asker_of_first(recording):
    for event in recording.events:
        if event.kind == "preempt":
            return event.step, event.why.split()[0]
    return None


def no_none(recording):
    return next((event.step, event.rid) for event in recording.events if event.kind == "preempt")


def step_before(recording):
    for event in recording.events:
        if event.kind == "preempt":
            return event.step - 1, event.rid
    return None


def from_table(recording):
    rows = recording.requests.rows()
    return next(((row["admitted"], row["request"]) for row in rows if row["preemptions"]), None)


def early(table, free, n, size):  # takes a block when this token fills the last one
    slot = table[n // size] * size + n % size if n < len(table) * size else None
    if slot is None or (n + 1) % size == 0:
        table.append(free.pop(0))
    return table[n // size] * size + n % size


def newest_free(table, free, n, size):
    if n == len(table) * size:
        table.append(free.pop())
    return table[n // size] * size + n % size


def off_by_one(table, free, n, size):
    if n == len(table) * size:
        if not free:
            raise OutOfBlocks(1, 0)
        table.append(free.pop(0))
    return table[-1] * size + (n + 1) % size


def never_checks(table, free, n, size):
    if n == len(table) * size:
        table.append(free.pop(0))  # IndexError when nothing is free
    return table[n // size] * size + n % size


def never_grows(table, free, n, size):
    return table[n // size] * size + n % size


def takes_and_keeps(table, free, n, size):  # the block stays in the free list
    if n == len(table) * size:
        if not free:
            raise OutOfBlocks(1, 0)
        table.append(free[0])
    return table[n // size] * size + n % size


def spoils_then_raises(table, free, n, size):
    if n == len(table) * size:
        if not free:
            table.append(-1)
            raise OutOfBlocks(1, 0)
        table.append(free.pop(0))
    return table[n // size] * size + n % size


def mutates(table, start, n, size):
    slots = [table[p // size] * size + p % size for p in range(start, start + n)]
    table.pop()
    return slots


WRONG = [
    ("00.1", ["oldest"], "Not the oldest"),
    ("00.1", ["largest"], "Not the largest"),
    ("00.1", ["random"], "not one of the choices"),
    ("00.2", [24, "r4", "r3 needs 1 block, 0 free"], "not for the first time"),
    ("00.2", [13, "r5", CAUSE], "Nobody is preempted in step 13"),
    ("00.2", [14, "r0", CAUSE], "asked for the block"),
    ("00.2", [14, "r4", CAUSE], "the victim is not"),
    ("00.2", [14, "r5", "the pool was full"], "name the request"),
    ("00.2", [14, "r5", "r0 is older"], "how many blocks"),
    ("00.2", [14, "r5", "r5 needs 1 block, 0 free"], "name the request"),
    ("00.3", [last_preemption], "it was"),
    ("00.3", [asker_of_first], "it was"),
    ("00.3", [no_none], "raised StopIteration"),
    ("00.3", [step_before], "it was"),
    ("00.3", [from_table], "it was"),
    ("00.3", [lambda recording: None], "a pair"),
    ("00.3", ["r5"], "wants your function"),
    ("01.2", [lambda t, start, n, size: list(range(start, start + n))], "Those are positions"),
    ("01.2", [lambda t, start, n, size: [t[0] * size + p for p in range(start, start + n)]], "side by side"),
    ("01.2", [lambda t, start, n, size: [t[p // size] * size + p % size for p in range(n)]], "start=0"),
    (
        "01.2",
        [lambda t, start, n, size: [t[p // size] * size for p in range(start, start + n)]],
        "first slots",
    ),
    ("01.2", [lambda t, start, n, size: [t[p // size] for p in range(start, start + n)]], "block ids"),
    (
        "01.2",
        [lambda t, start, n, size: [t[p // 16] * 16 + p % 16 for p in range(start, start + n)]],
        "yours says",
    ),
    (
        "01.2",
        [lambda t, start, n, size: [t[p // size] * size + p % size for p in range(start, n)]],
        "should return",
    ),
    ("01.2", [mutates], "only read it"),
    ("01.2", [lambda t, start, n, size: None], "list of"),
    ("01.3", [early], "too early"),
    ("01.3", [newest_free], "first of the free list"),
    ("01.3", [off_by_one], "should return slot"),
    ("01.3", [never_checks], "OutOfBlocks(1, 0), not IndexError"),
    ("01.3", [never_grows], "raised IndexError"),
    ("01.3", [takes_and_keeps], "should leave free"),
    ("01.3", [spoils_then_raises], "must stay"),
]


@pytest.mark.parametrize(("exercise_id", "answers", "says"), WRONG)
def test_wrong_answers_are_refused(exercise_id, answers, says):
    verdict = check(exercise_id, *answers)
    assert not verdict
    assert verdict.mark == "✗"
    assert says in repr(verdict), verdict


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ([0, 1, 2, 6], "belongs to r2"),  # as if r0 were the first to need a block
        ([0, 1, 2, 3], "belongs to r1"),  # as if blocks were side by side
        ([0, 1, 2, 9], "is free"),
        ([0, 1, 2], "does not take 3"),
        (4, "list of block ids"),
    ],
)
def test_wrong_tables_are_refused(session, prediction, says):
    verdict = check("01.1", prediction, session)
    assert not verdict
    assert says in repr(verdict), verdict


def test_each_exercise_has_two_wrong_answers():
    refused = {exercise_id: sum(w[0] == exercise_id for w in WRONG) for exercise_id in exercises()}
    refused["01.1"] = 5
    elsewhere = ("02", "03", "07", "08", "10")  # test_reserving, test_batching, test_what_ifs, ...
    refused |= {name: 2 for name in refused if name[:2] in elsewhere}
    assert min(refused.values()) >= 2


def test_wrong_slots_show_in_the_real_pool(session, monkeypatch):
    """Were the random tables too kind, the keys of the real pool would still tell."""
    from pagedinfer.course import block_tables

    monkeypatch.setattr(
        block_tables, "slot_mapping", lambda table, start, n, size: list(range(start, start + n))
    )
    verdict = check("01.2", lambda table, start, n, size: list(range(start, start + n)), session)
    assert "other keys" in repr(verdict)


# -- no answer yet, misuse, hints -------------------------------------------------------------------------------------


def stub(*arguments):
    raise NotImplementedError


def test_stubs_are_no_answer_yet(session):
    for exercise_id, answers in {
        "00.1": [...],
        "00.2": [..., ..., ...],
        "00.3": [stub],
        "01.1": [..., session],
        "01.2": [stub],
        "01.3": [stub],
    }.items():
        verdict = check(exercise_id, *answers)
        assert not verdict
        assert verdict.mark == "…"
        assert f'hint("{exercise_id}")' in repr(verdict)


def test_a_prediction_waits_for_its_step():
    engine = Engine(EngineConfig(num_blocks=12), SimulatedRunner())
    assert "at step 0" in repr(check("01.1", [0, 1, 2, 8], Session(engine)))


def test_misuse_is_a_sentence():
    with pytest.raises(ConfigError, match=r'check\("00.2", step, victim, cause\)'):
        check("00.2", 14)
    for function in (check, hint, reveal):
        with pytest.raises(ConfigError, match=r"No exercise '09\.9'; there are 00\.1, "):
            function("09.9")
    with pytest.raises(ConfigError, match="eight_requests"):
        bundled_recording("nine_requests")


def test_hints_come_one_by_one(monkeypatch):
    monkeypatch.setattr(course, "_hints_given", {})
    shown = [hint("00.2") for _ in range(4)]
    assert [sum(line[:2] in ("1.", "2.", "3.") for line in card.lines) for card in shown] == [1, 2, 3, 3]
    assert 'reveal("00.2")' in repr(shown[2])
    assert hint("00.1").heading.endswith("hint 1 of 3")


def test_hints_are_three_each_and_differ():
    for exercise in exercises().values():
        assert len(set(exercise.hints)) == 3
        assert exercise.code not in exercise.hints


def test_cards_do_not_speak_by_colour_alone():
    for card, words in (
        (check("00.1", "newest"), ("✓", "passed")),
        (check("00.1", "oldest"), ("✗", "not yet")),
        (check("00.1", ...), ("…", "no answer yet")),
        (reveal("00.3"), ("!", "solution")),
    ):
        for text in (repr(card), card._repr_html_()):
            assert all(word in text for word in words)
    assert "<lambda>" not in check("00.3", lambda recording: 1 / 0)._repr_html_()  # escaped


# -- the bundled recording --------------------------------------------------------------------------------------------


def test_recording_is_small_and_has_no_wall_time():
    from importlib.resources import files

    text = (files("pagedinfer.course") / "recordings" / "eight_requests.jsonl").read_text(encoding="utf-8")
    assert len(text.encode()) < 200_000
    assert '"t":' not in text
    assert bundled_recording().to_jsonl(wall=False) == text


def test_recording_is_what_this_engine_does():
    """A recording of an older scheduler would teach what no engine does: then run notebooks/record.py again."""
    recording = bundled_recording()
    assert rerun(recording)[1].to_jsonl(wall=False) == recording.to_jsonl(wall=False)


def test_recording_holds_what_the_notebook_says():
    recording = bundled_recording()
    rows = {row["request"]: row for row in recording.requests.rows()}
    assert list(rows) == [f"r{i}" for i in range(8)] == list(bundled_texts())
    assert recording.config["num_blocks"] == 40
    assert recording.config["block_size"] == 8
    assert recording.at(1).last.scheduled == {"r0": 44, "r1": 20}
    assert recording.at(12).usage()["kv_usage"] == 1.0
    assert recording.at(14).last.preempted == ["r5"]
    assert (rows["r6"]["submitted"], rows["r6"]["admitted"]) == (12, 43)
    assert recording.at(43).last.resumed == ["r5"]
    assert max(row["submitted"] for row in rows.values()) == 16


def test_notebook_00_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from pagedinfer.course import bundled_recording, check, exercises, hint, reveal\n"
        "names = {}; exec(exercises()['00.3'].code, names)\n"
        "assert check('00.3', names['first_preemption']) and check('00.1', 'newest') and bundled_recording()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- whatever a learner gives ------------------------------------------------------------------------------------------


def test_a_run_without_r0_or_no_session_gets_a_sentence(session):
    from pagedinfer.config import SamplingParams

    with (
        Engine(EngineConfig(num_blocks=20, block_size=4), SimulatedRunner()) as engine,
        Session(engine) as other,
    ):
        for tokens in (2, 12):
            other.submit([1, 2], SamplingParams(max_tokens=tokens, detokenize=False))
        other.run()
        assert "There is no r0 after step 8 of this run" in check("01.1", [0], other).lines[0]
        assert check("01.1", [0, 1, 2, 8], engine).lines[0].startswith("The check wants your session")
    for nothing in (None, 5, "session", object, [session]):
        assert "it got " in check("01.1", [0], nothing).lines[0]
        if nothing is not None:
            assert "it got " in check("01.2", solution("01.2")["slot_mapping"], nothing).lines[0]


def test_arrays_are_answers(session):
    import numpy as np

    right = solution("01.2")["slot_mapping"]
    assert check("01.1", np.array([0, 1, 2, 8]), session)
    assert check("01.2", lambda *a: np.array(right(*a)))
    assert check("00.2", np.int64(14), np.array("r5"), "r0 needs 1 block, 0 free")
    assert not check("00.2", np.array([14, 15]), "r5", CAUSE)
    assert not check("00.1", np.array(["newest", "oldest"]))
    assert not check("00.3", lambda recording: (np.array([1, 2]), "r1"))
    assert not check("01.3", lambda table, free, n, size: np.array([1, 2]))


def test_endless_iterators_and_long_lists_end_in_short_cards(session):
    from itertools import count

    def broken():
        yield 1
        raise KeyError("later")

    for answer in (count(), [7] * 10**6, broken(), 10**5000, [10**5000]):
        for verdict in (
            check("01.1", answer, session),
            check("01.2", lambda *_, answer=answer: answer),
            check("00.3", lambda _, answer=answer: answer),
            check("01.3", lambda *_, answer=answer: answer),
            check("00.2", answer, "r5", CAUSE),
            check("00.2", 14, answer, CAUSE),
        ):
            assert not verdict
            assert len(repr(verdict)) < 2_000


def test_leaving_is_a_failure_not_an_exit():
    for exercise_id in ("00.3", "01.2", "01.3"):
        assert "raised SystemExit: 3" in check(exercise_id, lambda *_: sys.exit(3)).lines[0]

    def grown(table, free, num_tokens, block_size):
        if table == [3, 1] and not free:  # the last case, where there is nothing to take
            sys.exit(1)
        return solution("01.3")["append_token"](table, free, num_tokens, block_size)

    assert "not SystemExit" in check("01.3", grown).lines[0]
