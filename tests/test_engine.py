"""The engine over the simulated runner: no model, every path of a request's life."""

import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import deque

import pytest

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.completion import complete
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import StepResult
from pagedinfer.errors import (
    ConfigError,
    DuplicateRequest,
    EngineClosed,
    PagedInferError,
    RequestError,
    RequestTooLong,
    RunnerError,
    UnknownRequest,
)
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.testing import assert_no_leak, force_preempt, run_bounded
from pagedinfer.trace.recorder import Recorder
from pagedinfer.trace.replay import fold


def letters(item):
    """Output token i of every request is the i-th letter."""
    return 97 + item.output_index % 26


def make(rule=letters, *, runner=None, **options):
    config = EngineConfig(**({"num_blocks": 16, "block_size": 4, "max_model_len": 128} | options))
    runner = runner or SimulatedRunner(vocab_size=259, rule=rule)
    return Engine(config, runner, tokenizer=ByteTokenizer())


def drain(engine, max_steps=500):
    return run_bounded(engine, max_steps)


# -- a request's life -------------------------------------------------------------------------------------------------


def test_a_request_grows_step_by_step():
    engine = make()
    assert engine.add_request("Hi", SamplingParams(max_tokens=3)) == "r0"
    texts = []
    while engine.has_unfinished():
        (output,) = engine.step()
        texts.append((output.outputs[0].text, list(output.outputs[0].token_ids), output.finished))
    assert texts == [("a", [97], False), ("ab", [97, 98], False), ("abc", [97, 98, 99], True)]
    assert output.prompt == "Hi"
    assert output.prompt_token_ids == [256, 72, 105]
    assert output.outputs[0].finish_reason == "length"
    assert output.detail == "3 tokens produced"
    assert output.error is None
    assert_no_leak(engine)
    assert engine.step() == []


def test_an_output_is_a_value_of_its_own():
    engine = make()
    engine.add_request("Hi", SamplingParams(max_tokens=2, logprobs=None))
    (first,) = engine.step()
    engine.step()
    assert list(first.outputs[0].token_ids) == [97]
    assert first.prompt_token_ids == [256, 72, 105]


def test_without_a_tokenizer_ids_are_enough():
    engine = Engine(
        EngineConfig(num_blocks=4), SimulatedRunner(vocab_size=10, rule=lambda item: 7), eos_token_ids=[7]
    )
    engine.add_request([1, 2])
    (output,) = drain(engine).values()
    assert output.outputs[0].text == ""
    assert output.outputs[0].finish_reason == "stop"
    with pytest.raises(RequestError, match="no tokenizer"):
        engine.add_request("text")
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.add_request([1], SamplingParams(stop="a"))


def test_detokenize_false_leaves_the_text_empty():
    engine = make()
    engine.add_request("Hi", SamplingParams(max_tokens=2, detokenize=False))
    (output,) = drain(engine).values()
    assert output.outputs[0].text == ""
    assert list(output.outputs[0].token_ids) == [97, 98]


def test_max_tokens_none_means_to_the_end_of_the_context():
    engine = make(max_model_len=20)
    engine.add_request([1] * 5, SamplingParams(max_tokens=None))
    (output,) = drain(engine).values()
    assert len(output.outputs[0].token_ids) == 15
    assert output.outputs[0].finish_reason == "length"


# -- at the door ------------------------------------------------------------------------------------------------------


def test_ids_are_made_up_and_never_collide():
    engine = make()
    engine.add_request("a", request_id="r1")
    assert [engine.add_request("a") for _ in range(3)] == ["r2", "r3", "r4"]
    with pytest.raises(ConfigError, match="non-empty string"):
        engine.add_request("a", request_id="")
    with pytest.raises(ConfigError, match="7"):
        engine.add_request("a", request_id=7)


def test_sc_18_a_live_id_is_refused_and_an_ended_one_is_free():
    engine = make()
    engine.add_request("a", SamplingParams(max_tokens=4), request_id="a")
    engine.step()
    with pytest.raises(DuplicateRequest, match="'a' is still live"):
        engine.add_request("b", request_id="a")
    assert drain(engine)["a"].outputs[0].text == "abcd"
    engine.add_request("c", SamplingParams(max_tokens=2), request_id="a")
    assert drain(engine)["a"].outputs[0].text == "ab"
    assert_no_leak(engine)


@pytest.mark.parametrize("priority", [1, -1, 0.5, None, True])
def test_priorities_are_refused_until_there_are_any(priority):
    with pytest.raises(ConfigError, match="priority"):
        make().add_request("a", priority=priority)


def test_sv_04_foreign_ids_never_reach_the_runner():
    engine = make()
    engine.add_request("ok", SamplingParams(max_tokens=3))
    for bad in ([259], [-1], [2**31], [True], [1.0]):
        with pytest.raises(RequestError):
            engine.add_request(bad)
    with pytest.raises(ConfigError, match="259"):
        engine.add_request("a", SamplingParams(stop_token_ids=[259]))
    assert drain(engine)["r0"].outputs[0].text == "abc"
    assert engine.metrics()["num_submitted"] == 1


def test_what_can_never_fit_is_refused_with_its_numbers():
    engine = make(num_blocks=4)
    with pytest.raises(RequestTooLong, match=r"its 17 tokens need 5 blocks of 4, the whole pool has 4"):
        engine.add_request([1] * 17)
    with pytest.raises(RequestTooLong, match=r"128 prompt tokens.*max_model_len=128.*127"):
        make(num_blocks=99).add_request([1] * 128)
    engine.add_request([1] * 16, SamplingParams(max_tokens=1))
    assert len(drain(engine)) == 1


def test_a_refused_prompt_does_not_shift_the_seeds_of_later_ones():
    engine, other = make(), make()
    with pytest.raises(RequestError):
        engine.add_request([])
    engine.add_request("a")
    other.add_request("a")
    assert engine.request("r0").seed == other.request("r0").seed
    engine.add_request("a")
    assert engine.request("r1").seed != engine.request("r0").seed


def test_a_request_that_outgrows_the_pool_says_so():
    engine = make(num_blocks=3)
    engine.add_request([1] * 4, SamplingParams(max_tokens=50))
    (output,) = drain(engine).values()
    assert output.outputs[0].finish_reason == "length"
    assert output.detail == "its 13 tokens need 4 blocks of 4, the whole pool has 3"
    assert output.outputs[0].text == "abcdefghi"
    assert_no_leak(engine)


def test_bm_12_never_more_blocks_than_the_context_has():
    engine = make(max_model_len=10)
    engine.add_request([1] * 9, SamplingParams(max_tokens=50))
    widths = []
    while engine.has_unfinished():
        widths.append(max((len(table) for table in engine.snapshot()["block_tables"].values()), default=0))
        outputs = engine.step()
    assert max(widths) <= 3
    assert (outputs[0].outputs[0].finish_reason, len(outputs[0].outputs[0].token_ids)) == ("length", 1)
    for prompt in ([1] * 10, [1] * 11):
        with pytest.raises(RequestTooLong):
            engine.add_request(prompt)
    assert_no_leak(engine)


# -- ends -------------------------------------------------------------------------------------------------------------


def script(*rows):
    """A rule that plays one row of tokens for each request, in order of their ids r0, r1, ..."""
    return lambda item: rows[int(item.request_id[1:])][item.output_index]


@pytest.mark.parametrize("end_id", [5, 6, 257])
def test_sd_16_every_end_id_ends(end_id):
    config = EngineConfig(num_blocks=8)
    runner = SimulatedRunner(vocab_size=259, rule=script([65, end_id, 66]))
    engine = Engine(config, runner, tokenizer=ByteTokenizer(), eos_token_ids=[5, 6])  # 257 is the tokenizer's
    engine.add_request("a")
    (output,) = drain(engine).values()
    assert list(output.outputs[0].token_ids) == [65, end_id]
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("A", "stop")
    assert output.outputs[0].stop_reason is None
    assert str(end_id) in output.detail


def test_ignore_eos_goes_on_and_stop_token_ids_still_end():
    engine = make(script([65, 257, 66, 67]))
    engine.add_request("a", SamplingParams(ignore_eos=True, stop_token_ids=[67]))
    (output,) = drain(engine).values()
    assert list(output.outputs[0].token_ids) == [65, 257, 66, 67]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 67)
    assert output.outputs[0].text == "AB"


def test_a_stop_string_is_the_reason():
    engine = make()
    engine.add_request("abc", SamplingParams(stop=["zz", "cd"]))
    (output,) = drain(engine).values()
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].stop_reason == "cd"
    assert list(output.outputs[0].token_ids) == [97, 98, 99, 100]  # usage counts the token produced
    assert "'cd'" in output.detail


def test_sd_02_a_stop_string_in_the_prompt_does_not_count():
    engine = make()
    engine.add_request("the stop", SamplingParams(stop="stop", max_tokens=3))
    (output,) = drain(engine).values()
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("abc", "length")


def test_end_ids_are_forbidden_before_min_tokens():
    seen = []

    def rule(item):
        seen.append(item.forbidden_token_ids)
        return 257

    engine = make(rule)
    engine.add_request("a", SamplingParams(min_tokens=2, stop_token_ids=[9]))
    (output,) = drain(engine).values()
    assert seen == [(257, 9), (257, 9), ()]
    assert list(output.outputs[0].token_ids) == [258, 258, 257]
    assert output.outputs[0].finish_reason == "stop"


# -- abort ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_returns_what_there_is(steps):
    engine = make()
    engine.add_request("a", SamplingParams(stop="zz"))
    for _ in range(steps):
        engine.step()
    output = engine.abort("r0")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "abc"[:steps]
    assert_no_leak(engine)
    assert engine.step() == []


def test_an_unknown_id_is_an_error():
    engine = make()
    for call in (engine.abort, engine.request):
        with pytest.raises(UnknownRequest, match="No live request 'x'"):
            call("x")
    with pytest.raises(RequestError, match="must run"):
        engine.preempt("x", "why not")


@pytest.mark.parametrize("kind", ["submit", "step", "admit", "alloc", "commit", "free", "finish", "cancel"])
@pytest.mark.parametrize("victim", ["r0", "r1"])
def test_a_subscriber_may_abort_at_any_event(kind, victim):
    engine = make(num_blocks=4, max_num_seqs=1 if kind == "admit" else 4)
    aborted = []

    def subscriber(event):
        if event.kind == kind and event.step > 0 and not aborted and victim in engine.scheduler.requests:
            aborted.append(victim)
            aborted.append(engine.abort(victim))

    with Recorder(engine) as recording:
        for prompt in ("a", "bbbb"):
            engine.add_request(prompt, SamplingParams(max_tokens=6))
        engine.bus.subscribe(subscriber)
        done, fail = {}, kind == "cancel"
        for _ in range(100):
            if kind == "submit" and engine.scheduler.step == 2 and "late" not in done:
                done["late"] = None
                engine.add_request("c", SamplingParams(max_tokens=1), request_id="late")
            if fail:
                execute, engine.runner.execute = engine.runner.execute, None
                with pytest.raises(TypeError):
                    engine.step()
                engine.runner.execute, fail = execute, False
            done.update((output.request_id, output) for output in engine.step() if output.finished)
            engine.check()
        assert not engine.has_unfinished()
        assert fold(recording.events).snapshot() == engine.snapshot()
    if kind == "finish" and victim == "r0":
        assert not aborted  # it was the first to finish itself
    else:
        assert aborted[0] == victim
        output = aborted[1] or done[victim]
        assert (victim in done) == (aborted[1] is None)  # handed out once
        assert output.outputs[0].finish_reason == "abort"
    for rid in {"r0", "r1"} - set(aborted[:1]):
        assert done[rid].outputs[0].text == "abcdef"
    assert_no_leak(engine)


def test_a_subscriber_may_submit_and_may_not_step():
    engine = make()
    errors = []

    def subscriber(event):
        if event.kind == "finish" and event.rid == "r0":
            engine.add_request("b", SamplingParams(max_tokens=2), request_id="next")
            with pytest.raises(PagedInferError, match="inside a step") as caught:
                engine.step()
            errors.append(caught.value)

    engine.bus.subscribe(subscriber)
    engine.add_request("a", SamplingParams(max_tokens=2))
    assert set(drain(engine)) == {"r0", "next"}
    assert errors


# -- what goes wrong elsewhere ----------------------------------------------------------------------------------------


class Runner(SimulatedRunner):
    """Does `trouble[k]` at its k-th call instead of computing."""

    def __init__(self, **trouble):
        super().__init__(vocab_size=259, rule=letters)
        self.trouble = {int(name[1:]): what for name, what in trouble.items()}

    def execute(self, plan):
        what = self.trouble.pop(self.num_steps, None)
        result = super().execute(plan)
        return result if what is None else what(result)


def raising(error):
    def trouble(result):
        raise error

    return trouble


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_runner_that_raises_costs_the_step_and_nothing_else(error):
    engine = make(runner=Runner(_0=raising(error), _2=raising(error)))
    with Recorder(engine) as recording:
        engine.add_request("abc", SamplingParams(max_tokens=4))
        engine.add_request("de", SamplingParams(max_tokens=4))
        before = engine.snapshot()
        with pytest.raises(type(error)):
            engine.step()
        assert engine.snapshot() == before
        engine.check()
        engine.step()
        with pytest.raises(type(error)):
            engine.step()
        done = drain(engine)
    assert [output.outputs[0].text for output in done.values()] == ["abcd", "abcd"]
    assert_no_leak(engine)
    told = [event for event in recording.errors if event.where == "runner"]
    assert [event.what for event in told] == (
        ["RuntimeError: out of memory"] * 2 if isinstance(error, Exception) else []
    )


def test_one_failed_row_ends_one_request():
    def half(result):
        return StepResult({"r1": result.tokens["r1"]}, errors={"r0": "the logits are not finite"})

    engine = make(runner=Runner(_1=half))
    for prompt in ("a", "b"):
        engine.add_request(prompt, SamplingParams(max_tokens=4))
    done = drain(engine)
    assert done["r0"].error == "the logits are not finite"
    assert (done["r0"].outputs[0].finish_reason, done["r0"].outputs[0].text) == ("error", "a")
    assert (done["r1"].outputs[0].finish_reason, done["r1"].outputs[0].text) == ("length", "abcd")
    assert done["r1"].error is None
    assert_no_leak(engine)


class Broken(ByteTokenizer):
    """Cannot decode the letter c."""

    def decode(self, token_ids, *, skip_special_tokens=True):
        if 99 in token_ids:
            raise ValueError("no letter c")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def test_a_tokenizer_that_raises_ends_one_request():
    engine = Engine(
        EngineConfig(num_blocks=16), SimulatedRunner(vocab_size=259, rule=letters), tokenizer=Broken()
    )
    engine.add_request("a", SamplingParams(max_tokens=5))
    engine.add_request("b", SamplingParams(max_tokens=5, detokenize=False))
    engine.add_request("c", SamplingParams(max_tokens=2))
    done = drain(engine)
    assert done["r0"].error == "ValueError while making text: no letter c"
    assert done["r0"].outputs[0].text == "ab"
    assert [len(done[rid].outputs[0].token_ids) for rid in ("r0", "r1", "r2")] == [3, 5, 2]
    assert done["r2"].outputs[0].text == "ab"
    assert_no_leak(engine)


def test_a_subscriber_that_raises_is_warned_about_and_detached():
    engine = make()
    seen = []

    def bad(event):
        seen.append(event.kind)
        raise RuntimeError("broken view")

    with Recorder(engine) as recording:
        engine.bus.subscribe(bad)
        with pytest.warns(UserWarning, match="broken view.*run goes on"):
            engine.add_request("a", SamplingParams(max_tokens=3))
        with warnings.catch_warnings(action="error"):
            assert drain(engine)["r0"].outputs[0].text == "abc"
    assert seen == ["submit"]
    assert [event.where for event in recording.errors] == ["subscriber"]


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------


def ctrl_c(times=1):
    def trouble(result):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return result

    return trouble


def test_the_first_ctrl_c_waits_for_the_step_and_loses_nothing():
    engine = make(runner=Runner(_1=ctrl_c()))
    engine.add_request("a", SamplingParams(max_tokens=2))
    engine.add_request("b", SamplingParams(max_tokens=3))
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check()
    assert engine.metrics()["num_steps"] == 2  # the step was finished
    outputs = [output for output in engine.step() if output.finished]
    assert sorted(output.request_id for output in outputs) == ["r0", "r1"]
    assert_no_leak(engine)


def test_the_second_ctrl_c_cancels_the_step():
    engine = make(runner=Runner(_1=ctrl_c(times=2)))
    engine.add_request("a", SamplingParams(max_tokens=3))
    engine.step()
    before = engine.snapshot()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.snapshot() == before
    engine.check()
    assert drain(engine)["r0"].outputs[0].text == "abc"


def test_a_ctrl_c_beside_a_runner_error_is_not_lost():
    def both(result):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("failed")

    engine = make(runner=Runner(_0=both))
    engine.add_request("a", SamplingParams(max_tokens=3))
    with pytest.raises(KeyboardInterrupt) as caught:
        engine.step()
    assert isinstance(caught.value.__context__, RuntimeError)
    assert drain(engine)["r0"].outputs[0].text == "abc"


@pytest.mark.parametrize("kind", ["submit", "step", "alloc", "commit", "finish"])
def test_a_ctrl_c_during_bookkeeping_leaves_the_books_right(kind):
    engine = make()
    hit = []

    def subscriber(event):
        if event.kind == kind and not hit:
            hit.append(event)
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    engine.bus.subscribe(subscriber)
    interrupts = 0
    try:
        engine.add_request("a", SamplingParams(max_tokens=2), request_id="a")
    except KeyboardInterrupt:
        interrupts += 1
    engine.check()
    texts = {}
    for _ in range(10):
        try:
            texts |= {output.request_id: output.outputs[0].text for output in engine.step()}
        except KeyboardInterrupt:
            interrupts += 1
        engine.check()
    assert interrupts == 1
    assert texts == {"a": "ab"}
    assert_no_leak(engine)


def test_abort_after_an_interrupted_step_leaves_no_old_output_behind():
    engine = make(runner=Runner(_0=ctrl_c()))
    engine.add_request("a")
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.abort("r0").outputs[0].text == "a"
    assert not engine.has_unfinished()
    assert engine.step() == []


# -- who gets an output -----------------------------------------------------------------------------------------------


def test_handed_back_outputs_come_with_the_next_step():
    engine = make()
    engine.add_request("a", SamplingParams(max_tokens=1))
    outputs = engine.step()
    assert not engine.has_unfinished()
    engine.hand_back(outputs)
    assert engine.has_unfinished()
    assert engine.step() == outputs
    assert not engine.has_unfinished()


def test_an_outbox_gets_its_requests_outputs_whoever_steps_or_aborts():
    engine, box = make(), deque()
    engine.add_request("a", SamplingParams(max_tokens=2), outbox=box)
    engine.add_request("b", SamplingParams(max_tokens=9), outbox=box)
    engine.add_request("c", SamplingParams(max_tokens=2))
    for _ in range(2):
        assert [output.request_id for output in engine.step()] == ["r2"]
    returned = engine.abort("r1")
    assert [(o.request_id, o.finished) for o in box] == [
        ("r0", False), ("r1", False), ("r0", True), ("r1", False), ("r1", True),
    ]  # fmt: skip
    assert box[-1] is returned
    assert engine.step() == []


# -- preemption, metrics, the rest ------------------------------------------------------------------------------------


def test_a_preempted_request_goes_on_where_it_was():
    engine = make()
    engine.add_request("a", SamplingParams(max_tokens=6))
    for _ in range(3):
        engine.step()
        force_preempt(engine, "r0")
        engine.check()
        assert engine.request("r0").num_preemptions
    assert drain(engine)["r0"].outputs[0].text == "abcdef"
    assert engine.metrics()["num_preemptions"] == 3


def test_metrics_count():
    engine = make(max_num_seqs=1)
    assert engine.metrics() == {
        "num_steps": 0,
        "num_requests": 0,
        "num_prompt_tokens": 0,
        "num_output_tokens": 0,
        "num_draft_tokens": 0,
        "num_accepted_tokens": 0,
        "num_running": 0,
        "num_waiting": 0,
        "num_swapped": 0,
        "num_submitted": 0,
        "num_finished": 0,
        "num_preemptions": 0,
        "num_free_blocks": 16,
        "kv_usage": 0.0,
        "prefix_hit_rate": 0.0,
    }
    for _ in range(2):
        engine.add_request("abcdef", SamplingParams(max_tokens=2))
    engine.step()
    now = engine.metrics()
    assert (now["num_running"], now["num_waiting"], now["kv_usage"]) == (1, 1, 2 / 16)
    drain(engine)
    now = engine.metrics()
    assert now["num_finished"] == now["num_submitted"] == now["num_requests"] == 2
    assert (now["num_prompt_tokens"], now["num_output_tokens"]) == (
        2 * 7,
        2 * 2,
    )  # a begin token and six letters


def test_the_clock_is_the_callers():
    ticks = iter([0.5, 1.25, 7.0])
    engine = Engine(
        EngineConfig(num_blocks=4), SimulatedRunner(), clock=lambda: next(ticks), info={"model": "none"}
    )
    with Recorder(engine) as recording:
        engine.add_request([1], SamplingParams(max_tokens=2))
        engine.step()
        engine.step()
    assert [event.now for event in recording.events if event.kind in ("submit", "step")] == [0.5, 1.25, 7.0]
    assert recording.info == {"model": "none"}


def test_representations_show_the_state():
    engine = make()
    engine.add_request("abcdef")
    engine.step()
    assert repr(engine) == "Engine(step 1: 1 running, 0 waiting, 2 of 16 blocks used)"
    assert "num_preemptions" in engine._repr_html_()
    engine.add_request("<b>", SamplingParams(max_tokens=1), request_id="<i>")
    output = drain(engine)["<i>"]
    assert str(output) == "<i>: 'a' (length)"
    html = output._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "<i>" not in html
    engine.close()
    assert repr(engine).endswith(", closed)")


def test_close_ends_everything_once():
    engine, box = make(), deque()
    engine.add_request("a", outbox=box)
    engine.step()
    engine.close()
    engine.close()
    assert box[-1].outputs[0].finish_reason == "abort"
    assert_no_leak(engine)
    for call in (engine.step, lambda: engine.add_request("a")):
        with pytest.raises(EngineClosed, match="closed; make a new one"):
            call()
    with make() as other:
        other.add_request("a")
    with pytest.raises(EngineClosed):
        other.step()


def test_two_threads_share_an_engine():
    engine = make(num_blocks=64, max_num_seqs=8)
    done, errors = {}, []

    def work(name):
        try:
            for i in range(20):
                engine.add_request("ab", SamplingParams(max_tokens=3), request_id=f"{name}{i}")
                for _ in range(3):
                    done.update((o.request_id, o.outputs[0].text) for o in engine.step() if o.finished)
                engine.check()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    done |= {rid: output.outputs[0].text for rid, output in drain(engine).items()}
    assert done == {f"{name}{i}": "abc" for name in "xyz" for i in range(20)}
    assert_no_leak(engine)


# -- runners and subscribers of others --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (lambda rid: StepResult({}), "neither a token nor an error for r0"),
        (lambda rid: StepResult({rid: ()}), "neither a token nor an error for r0"),
        (
            lambda rid: StepResult({rid: (97,), "stranger": (97,)}),
            "tokens for stranger, which did not sample",
        ),
        (lambda rid: None, "is a NoneType; it must be a StepResult"),
        (lambda rid: StepResult(None), "tokens as a NoneType"),
        (lambda rid: StepResult({rid: (97,)}, errors=None), "errors as a NoneType"),
        (lambda rid: StepResult({rid: (97,)}, logprobs=None), "logprobs as a NoneType"),
        (lambda rid: StepResult({rid: (97,)}, errors={"ghost": "x"}), "errors for ghost, outside its plan"),
        (
            lambda rid: StepResult({rid: (97,)}, prompt_logprobs={"ghost": (0, [])}),
            "prompt_logprobs for ghost",
        ),
        (lambda rid: StepResult({}, errors={rid: None}), "a NoneType as error of r0"),
        (lambda rid: StepResult({rid: (97,), 5: (1,)}), "tokens for 5, which did not sample"),
        (lambda rid: StepResult({rid: (97, 98)}), r"\[97, 98\] as tokens of r0 with drafts \[\]"),
        (lambda rid: StepResult({rid: 5}), "a int as tokens of r0"),
        (lambda rid: StepResult({rid: "ab"}), "a str as tokens of r0"),
        (lambda rid: StepResult({rid: {3}}), "a set as tokens of r0"),
        (lambda rid: StepResult({rid: (1.5,)}), "1.5 among the tokens of r0"),
        (lambda rid: StepResult({rid: (True,)}), "True among the tokens of r0"),
        (lambda rid: StepResult({rid: (-1,)}), "-1 among the tokens of r0; ids are integers from 0 to 258"),
        (lambda rid: StepResult({rid: (259,)}), "259 among the tokens of r0"),
    ],
)
def test_a_runner_that_answers_wrongly_costs_the_step_and_nothing_else(answer, what):
    class Wrong(SimulatedRunner):
        wrong = True

        def execute(self, plan):
            return answer("r0") if self.wrong else super().execute(plan)

    runner = Wrong(vocab_size=259, rule=letters)
    engine = make(runner=runner)
    engine.add_request("Hi", SamplingParams(max_tokens=3))
    before = engine.snapshot()
    with pytest.raises(RunnerError, match=what):
        engine.step()
    assert engine.snapshot() == before
    runner.wrong = False
    assert drain(engine)["r0"].outputs[0].text == "abc"
    assert_no_leak(engine)


@pytest.mark.filterwarnings("ignore:.*It is detached")
def test_a_subscriber_that_exits_leaves_no_plan_open():
    engine = make()

    def leave(event):
        raise SystemExit(f"at {event.kind}")

    engine.add_request("Hi", SamplingParams(max_tokens=3))
    engine.bus.subscribe(leave)
    assert drain(engine)["r0"].outputs[0].text == "abc"
    engine.check()


class Mute(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no text")


def test_a_runners_error_without_a_text_leaves_no_plan_open():
    engine = make(runner=Runner(_0=raising(Mute())))
    engine.add_request("Hi", SamplingParams(max_tokens=3))
    before = engine.snapshot()
    with Recorder(engine) as recording, pytest.raises(Mute):
        engine.step()
    assert engine.snapshot() == before
    assert [event.what for event in recording.errors] == ["Mute: (its text cannot be shown)"]
    assert drain(engine)["r0"].outputs[0].text == "abc"


@pytest.mark.parametrize("error", [ValueError("broken view"), Mute()])
def test_a_subscriber_that_raises_costs_no_step_where_warnings_are_errors(error, capsys):
    engine = make()

    def bad(event):
        raise error

    with warnings.catch_warnings(action="error"):
        engine.bus.subscribe(bad)
        engine.add_request("Hi", SamplingParams(max_tokens=3))
        engine.bus.subscribe(bad)
        assert drain(engine)["r0"].outputs[0].text == "abc"
    assert capsys.readouterr().err.count("It is detached; the run goes on.") == 2
    assert_no_leak(engine)


class Flaky(ByteTokenizer):
    """Cannot decode at the call of number `fail_at`, or from when it is `broken`."""

    calls, fail_at, broken = 0, None, False

    def decode(self, token_ids, *, skip_special_tokens=True):
        self.calls += 1
        if self.broken or self.calls == self.fail_at:
            raise ValueError("cannot decode")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)


def flaky(fail_at=None):
    tokenizer = Flaky()
    tokenizer.fail_at = fail_at
    runner = SimulatedRunner(vocab_size=259, rule=letters)
    return tokenizer, Engine(EngineConfig(num_blocks=16), runner, tokenizer=tokenizer)


def test_decoding_that_fails_costs_one_request_wherever_it_fails():
    tokenizer, engine = flaky()
    for _ in range(3):
        engine.add_request("a", SamplingParams(max_tokens=3))
    drain(engine)
    for fail_at in range(1, tokenizer.calls + 1):
        _, engine = flaky(fail_at)
        for _ in range(3):
            engine.add_request("a", SamplingParams(max_tokens=3))
        done = drain(engine)
        assert sorted(output.outputs[0].finish_reason for output in done.values()) == [
            "error",
            "length",
            "length",
        ]
        assert [output.error for output in done.values() if output.error] == [
            "ValueError while making text: cannot decode"
        ]
        assert_no_leak(engine)


def test_close_closes_the_runner_when_decoding_and_callers_fail():
    class Full(deque):
        def append(self, output):
            raise MemoryError("no room")

    class Closing(SimulatedRunner):
        closed = 0

        def close(self):
            self.closed += 1

    tokenizer, runner = Flaky(), Closing(vocab_size=259, rule=letters)
    engine = Engine(EngineConfig(num_blocks=16), runner, tokenizer=tokenizer)
    box, full = deque(), Full()
    for outbox in (box, full, box):
        engine.add_request("a", SamplingParams(max_tokens=30), outbox=outbox)
    tokenizer.broken = True
    with pytest.raises(MemoryError, match="no room"):
        engine.close()
    engine.close()
    assert runner.closed == 1
    assert [output.request_id for output in box if output.finished] == ["r0", "r2"]
    assert_no_leak(engine)


def test_a_group_and_a_request_never_share_an_id():
    engine, two = make(), SamplingParams(max_tokens=2, n=2)
    engine.add_request("a", SamplingParams(max_tokens=2), "x")
    with pytest.raises(DuplicateRequest, match="'x' is still live"):
        engine.add_request("a", two, "x")
    engine.add_request("a", SamplingParams(max_tokens=2), "r2.1")
    assert engine.add_request("a", two) == "r3"  # r2 itself is free, one of its outputs' names is not
    engine.check()


def test_equal_runs_give_equal_recordings_whatever_the_hash_seed():
    code = """
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.recorder import Recorder
engine = Engine(EngineConfig(num_blocks=9, block_size=4, max_model_len=64), SimulatedRunner())
with Recorder(engine) as recording:
    for i in range(12):
        engine.add_request([1], SamplingParams(max_tokens=5, n=1 + i % 3))
    engine.step()
    engine.close()
print(recording.to_jsonl(wall=False))
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert runs[0].count(b"abort") > 12
    assert runs[0] == runs[1] == runs[2]


# -- in the middle of a change, in the same thread --------------------------------------------------------------------


def interrupted_step(number, handler):
    """Three requests, the third step interrupted at its line of this number. Returns whether it has so many lines."""
    engine, lines, outputs = make(num_blocks=12), 0, {}
    folder = os.path.dirname(os.path.dirname(sys.modules[Engine.__module__].__file__))
    for _ in range(3):
        engine.add_request([1] * 3, SamplingParams(max_tokens=6))
    outputs |= {output.request_id: output for _ in range(2) for output in engine.step()}

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            lines += 1
            if lines == number:
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before, tracer = signal.signal(signal.SIGUSR1, lambda *_: handler(engine)), sys.gettrace()
    try:
        sys.settrace(trace)
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        finally:
            sys.settrace(tracer)
            signal.signal(signal.SIGUSR1, before)
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
    except EngineClosed:
        pass
    assert not engine.scheduler.requests
    assert_no_leak(engine)
    return lines >= number, {
        rid: (output.outputs[0].finish_reason, output.outputs[0].text) for rid, output in outputs.items()
    }


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no signal of the user's own")
def test_a_signal_handler_may_abort_at_any_line_of_a_step():
    number, more = 1, True
    while more:
        more, ends = interrupted_step(number, lambda engine: engine.abort("r1"))
        assert ends["r0"] == ends["r2"] == ("length", "abcdef")
        if (
            more and number > 100
        ):  # at the first lines the abort may come before the step, and return the output
            assert ends["r1"][1] in ("ab", "abc")
        number += 1
    assert number > 300


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no signal of the user's own")
def test_a_signal_handler_may_close_at_any_line_of_a_step():
    number, more = 1, True
    while more:
        more, ends = interrupted_step(number, Engine.close)
        assert not more or {reason for reason, _ in ends.values()} <= {None, "abort"}
        number += 1
    assert number > 300


def test_the_garbage_collector_may_close_a_stream_at_any_allocation():
    class Holder:
        pass

    params = SamplingParams(max_tokens=20)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # what is there before need not be looked at again and again
    try:
        for threshold in range(60, 140):
            gc.disable()
            gc.collect()
            engine = make(num_blocks=12, max_model_len=40)
            engine.add_request([1, 2, 3], params)
            holder = Holder()
            holder.me = holder  # what a traceback or a notebook's frame does
            holder.steps = complete(engine, [[5] * 6], [params])
            next(holder.steps)
            engine.add_request([1] * 7, params)
            engine.step()
            del holder
            gc.set_threshold(threshold, 1, 1)
            gc.enable()
            done = drain(engine)
            assert done["r0"].outputs[0].finish_reason == done["r2"].outputs[0].finish_reason == "length"
            gc.collect()
            assert_no_leak(engine)
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()


def test_close_in_a_callback_waits_for_the_end_of_the_call():
    engine = make()
    engine.add_request("a", SamplingParams(max_tokens=5))
    engine.step()
    engine.bus.subscribe(lambda event: engine.close() if event.kind == "step" else None)
    (output,) = [output for output in engine.step() if output.finished]
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("abort", "ab")
    with pytest.raises(EngineClosed):
        engine.step()
    assert_no_leak(engine)
