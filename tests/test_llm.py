"""The offline interface on the tiny model: vLLM's names, one output per prompt, nothing lost."""

import asyncio
import gc
import signal
import sys
import threading
import weakref

import numpy
import pytest
import torch

import pagedinfer
from pagedinfer import LLM, SamplingParams
from pagedinfer.errors import ConfigError, EngineClosed, ModelError, RequestError, RequestTooLong
from pagedinfer.model.tiny import ByteTokenizer
from pagedinfer.testing import (
    assert_no_leak,
    assert_same,
    cold_outputs,
    force_preempt,
    poison,
    run_bounded,
    tiny_llm,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
WARM = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def llm():
    with tiny_llm(num_blocks=128) as llm:
        yield llm
        llm.engine.check()


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


# -- generate ---------------------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt_gives_the_same(llm):
    ids = ByteTokenizer().encode("Hello")
    expected = texts(cold_outputs(["Hello"], GREEDY))
    for prompts in (
        "Hello",
        ["Hello"],
        ids,
        [ids],
        {"prompt": "Hello"},
        {"prompt_token_ids": ids},
        [("Hello")],
        (ids,),
        numpy.array(ids),
        numpy.array([ids]),
        torch.tensor(ids),
        torch.tensor([ids]),
    ):
        assert texts(llm.generate(prompts, GREEDY)) == expected
    assert len(expected[0]) > 3


def test_outputs_have_vllms_names(llm):
    (output,) = llm.generate(
        "Hello", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    )
    assert output.prompt == "Hello"
    assert output.prompt_token_ids == [256, *b"Hello"]
    assert output.finished
    (completion,) = output.outputs
    assert completion.index == 0
    assert completion.finished()
    assert completion.text == ByteTokenizer().decode(completion.token_ids)
    assert len(completion.token_ids) == len(completion.logprobs) == 4
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)


def test_order_is_the_prompts_order_whatever_ends_first(llm):
    prompts = ["one", "two", "three", "four"]
    lengths = (9, 1, 5, 3)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert tuple(len(output.outputs[0].token_ids) for output in outputs) == lengths
    assert_same(outputs, cold_outputs(prompts, params))


def test_nothing_in_nothing_out(llm):
    assert llm.generate([]) == []
    assert llm.chat([]) == []
    assert not llm.engine.has_unfinished()


def test_defaults_are_vllms(llm):
    (output,) = llm.generate("Hello")
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_the_number_of_params_must_fit(llm):
    with pytest.raises(ConfigError, match="1 sampling_params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ConfigError, match="dict"):
        llm.generate(["a"], [{"temperature": 0}])
    assert not llm.engine.has_unfinished()


def test_params_that_do_not_suit_the_model_leave_nothing_behind(llm):
    with pytest.raises(ConfigError, match="300"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(stop_token_ids=[300])])
    assert_no_leak(llm.engine)


@pytest.mark.parametrize("params", [5, "greedy", {"temperature": 0}])
def test_params_of_another_type_are_refused(llm, params):
    with pytest.raises(
        ConfigError, match=f"sampling_params is an? {type(params).__name__}; give SamplingParams"
    ):
        llm.generate(["a"], params)
    assert_no_leak(llm.engine)


@pytest.mark.parametrize("messages", [None, 5, "Hello", {"role": "user", "content": "Hello"}])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError, match=f"Messages are an? {type(messages).__name__}; give a list"):
        llm.chat(messages)
    (output,) = llm.chat([5])  # several conversations, as it seems: a bad one costs only itself
    assert output.error.startswith("A conversation is an int; give a list")


@pytest.mark.parametrize("size", [{"num_blocks": 10**30}, {"kv_cache_bytes": 10**30}])
def test_a_pool_beyond_all_memory_is_refused(size):
    with pytest.raises(ConfigError, match="more than this machine gives; ask for fewer blocks"):
        LLM("tiny", **size)


@pytest.mark.parametrize("prompts", [None, 5, {"a"}, torch.tensor(5)])
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError, match="give text, token ids, or a list"):
        llm.generate(prompts)


BAD = [[1] * 3000, [], [999], [True], {"prompt": 3}, 1.5, None, "\ud800"]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: repr(bad)[:20])
def test_sc_16_a_bad_prompt_in_the_middle_costs_only_itself(llm, bad):
    outputs = llm.generate(["first", bad, "last"], GREEDY)
    assert len(outputs) == 3
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].outputs[0].finish_reason == "error"
    assert outputs[1].finished
    assert outputs[1].error == outputs[1].detail
    assert_same([outputs[0], outputs[2]], cold_outputs(["first", "last"], GREEDY))


@pytest.mark.parametrize("bad", [[1] * 3000, [999], {"prompt": 3}, "\ud800"], ids=lambda bad: repr(bad)[:20])
def test_a_single_bad_prompt_raises(llm, bad):
    with pytest.raises(RequestError):
        llm.generate(bad)
    with pytest.raises(RequestError):
        next(llm.stream(bad))
    assert not llm.engine.has_unfinished()


def test_a_prompt_too_long_says_its_numbers():
    with (
        tiny_llm(max_model_len=100) as llm,
        pytest.raises(RequestTooLong, match=r"200 prompt tokens.*max_model_len=100"),
    ):
        llm.generate([1] * 200)
    with tiny_llm(num_blocks=8) as llm:
        with pytest.raises(RequestTooLong, match=r"its 33 tokens need 9 blocks of 4, the whole pool has 8"):
            llm.generate([1] * 33)
        llm.engine.add_request([1] * 4, GREEDY)  # SC-02: the one that came after is served
        assert len(run_bounded(llm.engine, 100)) == 1


def test_bm_12_the_context_ends_the_output():
    with tiny_llm(max_model_len=10) as llm:
        (output,) = llm.generate([1] * 9, SamplingParams(max_tokens=50, ignore_eos=True))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
        (output,) = llm.generate([1] * 4, SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 6


def test_outgrowing_the_pool_is_told(llm):
    with tiny_llm(num_blocks=4) as small:
        (output,) = small.generate([1] * 8, SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert output.outputs[0].finish_reason == "length"
    assert output.detail == "its 17 tokens need 5 blocks of 4, the whole pool has 4"
    (whole,) = llm.generate([1] * 8, SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids


def test_other_requests_lose_nothing(llm):
    llm.engine.add_request("early", GREEDY, request_id="early")
    llm.engine.add_request(
        "long", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), request_id="long"
    )
    (output,) = llm.generate(["mine"], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert output.prompt == "mine"
    assert llm.engine.has_unfinished()
    done = run_bounded(llm.engine, 100)
    assert set(done) == {"early", "long"}
    assert_same([done["early"]], cold_outputs(["early"], GREEDY))


def test_two_threads_generate_in_one_engine(llm):
    results = {}

    def work(name):
        results[name] = llm.generate([name] * 3, GREEDY)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("ab", "cd", "ef")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, outputs in results.items():
        assert_same(outputs, cold_outputs([name] * 3, GREEDY))
    assert set(results) == {"ab", "cd", "ef"}
    assert_no_leak(llm.engine)


def test_a_request_that_somebody_else_aborts_does_not_hang(llm):
    victims = []

    def subscriber(event):
        if event.kind == "commit" and event.step == 3:
            victims.append(llm.engine.abort(sorted(llm.engine.scheduler.requests)[0]))

    with llm.engine.bus.subscribe(subscriber):
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "length"]
    assert outputs[0] is victims[0]
    assert len(outputs[0].outputs[0].token_ids) == 3


def test_progress_counts_prompts(llm, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    llm.generate(["a", [], "b"], GREEDY, use_tqdm=True)
    assert capsys.readouterr().err.split("\r")[1:] == [f"{n} of 3 prompts done" for n in (1, 2)] + [
        "3 of 3 prompts done\n"
    ]
    llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


# -- chat -------------------------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello"}]


def test_chat_uses_the_template(llm):
    (output,) = llm.chat(HELLO, GREEDY)
    assert ByteTokenizer().decode(output.prompt_token_ids) == "user: Hello\nassistant: "
    assert texts([output]) == texts(cold_outputs(["user: Hello\nassistant: "], GREEDY))
    (bare,) = llm.chat(HELLO, GREEDY, add_generation_prompt=False)
    assert ByteTokenizer().decode(bare.prompt_token_ids) == "user: Hello\n"


def test_parts_of_text_are_one_text(llm):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert (
        output.prompt_token_ids
        == llm.chat([{"role": "user", "content": "Hello\nyou"}], GREEDY)[0].prompt_token_ids
    )
    assert parts[1] == {"type": "text", "text": "you"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "holds a part of type 'image_url'; models here read text",
        ),
        ([{"type": "text", "text": "a"}, "b"], "holds 'b'; models here read text"),
        ([{"type": "text"}], "A text part of a message holds None; give text"),
        ({"type": "text", "text": "a"}, "The content of a message is a dict; give text"),
        (5, "The content of a message is an int; give text"),
    ],
)
def test_a_content_that_is_no_text_is_said_so(llm, content, said):
    with pytest.raises(RequestError, match=said):
        llm.chat([{"role": "user", "content": content}], GREEDY)


def test_chat_of_several(llm):
    bye = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Bye"}]
    both = llm.chat([HELLO, bye], GREEDY)
    assert texts(both) == texts(llm.chat(HELLO, GREEDY)) + texts(llm.chat(bye, GREEDY))


BAD_CHATS = [[], ["Hello"], [{"role": "user"}], "text", [{"content": "x"}]]


@pytest.mark.parametrize("bad", BAD_CHATS, ids=repr)
def test_sc_16_a_bad_conversation_costs_only_itself(llm, bad):
    outputs = llm.chat([HELLO, bad, HELLO], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert '"role"' in outputs[1].error
    assert texts(outputs)[0] == texts(outputs)[2] != ""


def test_a_single_bad_conversation_raises(llm):
    with pytest.raises(RequestError, match='"role" and "content"'):
        llm.chat([{"role": "user"}], GREEDY)
    with pytest.raises(RequestError, match='"role" and "content"'):
        llm.chat([{"role": "user", "content": "a"}, "b"], GREEDY)


def test_sd_18_one_begin_token_by_every_way_in(llm):
    prompt = ByteTokenizer().apply_chat_template(HELLO, tokenize=False)
    for output in (*llm.chat(HELLO, GREEDY), *llm.generate(prompt, GREEDY)):
        assert output.prompt_token_ids == ByteTokenizer().apply_chat_template(HELLO)
        assert list(output.prompt_token_ids).count(256) == 1


# -- stream -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [GREEDY, WARM, SamplingParams(temperature=0.0, stop=["!"], max_tokens=200)]
)
def test_a_stream_adds_up_to_generate(llm, params):
    pieces = list(llm.stream("Hello", params))
    assert "".join(pieces) == texts(llm.generate("Hello", params))[0]
    assert all(pieces)
    assert len(pieces) > 3


def test_the_pieces_come_while_the_request_runs(llm):
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    assert llm.engine.metrics()["num_running"] == 1
    assert len(list(stream)) > 1
    assert llm.engine.metrics()["num_running"] == 0


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_closed_stream_aborts(llm, pieces):
    stream = llm.stream("Hello", GREEDY)
    for _ in range(pieces):
        next(stream)
    stream.close()
    assert_no_leak(llm.engine)
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    del stream
    assert_no_leak(llm.engine)


def test_streams_may_be_interleaved(llm):
    prompts = ["first", "second", "third"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 3, 7)]
    expected = texts(llm.generate(prompts, params))
    streams = [llm.stream(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    got = [""] * 3
    for _ in range(40):
        for i, stream in enumerate(streams):
            got[i] += next(stream, "")
    assert got == expected
    assert_no_leak(llm.engine)


def test_a_stream_and_generate_share_the_engine(llm):
    stream = llm.stream("Hello", WARM)
    first = next(stream)
    outputs = llm.generate(["other"], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    assert len(outputs[0].outputs[0].token_ids) == 40
    assert first + "".join(stream) == texts(cold_outputs(["Hello"], WARM))[0]


def test_the_stream_of_a_failed_request_raises(llm):
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    poison(llm.engine)
    with pytest.raises(RequestError, match="not finite"):
        list(stream)
    assert_no_leak(llm.engine)


# -- Ctrl-C and callbacks ---------------------------------------------------------------------------------------------


def interrupt_at(llm, step, times=1):
    execute, left = llm.engine.runner.execute, [step]

    def patched(plan):
        if plan.step in left:
            left.clear()
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return execute(plan)

    llm.engine.runner.execute = patched


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("step", [1, 4, 8])  # at 8 the requests finish in the interrupted step
def test_ctrl_c_in_generate_leaves_the_engine_clean(llm, step, times):
    llm.engine.add_request(
        "other", SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True), request_id="other"
    )
    interrupt_at(llm, step, times)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    llm.engine.check()
    assert set(llm.engine.scheduler.requests) == {"other"}
    assert set(run_bounded(llm.engine, 50)) == {"other"}
    assert_no_leak(llm.engine)
    assert_same(llm.generate(["a"], GREEDY), cold_outputs(["a"], GREEDY))


def test_ctrl_c_while_prompts_are_submitted_leaves_nothing_behind(llm):
    def subscriber(event):
        if event.kind == "submit" and event.rid == "r1":
            signal.raise_signal(signal.SIGINT)

    with llm.engine.bus.subscribe(subscriber), pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c"], GREEDY)
    assert_no_leak(llm.engine)
    with (
        llm.engine.bus.subscribe(
            lambda event: signal.raise_signal(signal.SIGINT) if event.kind == "submit" else None
        ),
        pytest.raises(KeyboardInterrupt),
    ):
        next(llm.stream("a", GREEDY))
    assert_no_leak(llm.engine)


def test_ctrl_c_in_a_stream_aborts_it(llm):
    interrupt_at(llm, 3)
    stream = llm.stream("Hello", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert_no_leak(llm.engine)


def test_a_runner_error_in_generate_leaves_the_engine_clean(llm):
    execute, calls = llm.engine.runner.execute, []

    def patched(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return execute(plan)

    llm.engine.runner.execute = patched
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(["a", "b"], GREEDY)
    assert_no_leak(llm.engine)
    assert_same(llm.generate(["a"], GREEDY), cold_outputs(["a"], GREEDY))


def test_a_raising_subscriber_does_not_stop_generate(llm):
    def bad(event):
        raise RuntimeError("broken view")

    llm.engine.bus.subscribe(bad)
    with pytest.warns(UserWarning, match="broken view"):
        outputs = llm.generate(["a"], GREEDY)
    assert_same(outputs, cold_outputs(["a"], GREEDY))


# -- sampling ---------------------------------------------------------------------------------------------------------


def test_a_seed_decides_alone_or_in_a_batch(llm):
    alone = texts(llm.generate("Hello", WARM))
    crowd = [SamplingParams(temperature=t, max_tokens=20, ignore_eos=True) for t in (0.0, 0.5, 2.0)]
    together = llm.generate(["x", "Hello", "yy", "zzz"], [crowd[0], WARM, *crowd[1:]])
    assert texts(together)[1] == alone[0] == texts(cold_outputs(["Hello"], WARM))[0]
    other = SamplingParams(temperature=1.0, seed=8, max_tokens=12, ignore_eos=True)
    assert texts(llm.generate("Hello", other)) != alone


def test_the_engines_seed_decides_where_a_request_has_none():
    free = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2, 0, None):
        with tiny_llm(seed=seed) as llm:
            runs.append(texts(llm.generate(["a", "a"], free)))
    assert runs[0] == runs[1] != runs[2]
    assert runs[3] == runs[4]
    assert runs[0][0] != runs[0][1]  # each request has draws of its own


@pytest.mark.parametrize(
    "params",
    [
        WARM,
        GREEDY,
        SamplingParams(temperature=1.5, top_k=30, top_p=0.9, seed=3, max_tokens=12, ignore_eos=True),
    ],
)
def test_sd_12_preemption_after_any_token_changes_nothing(params):
    (cold,) = cold_outputs(["Hello"], params)
    for after in range(1, params.max_tokens):
        with tiny_llm(num_blocks=16, max_num_batched_tokens=4 if after % 2 else 64) as llm:
            rid = llm.engine.add_request("Hello", params)
            while llm.engine.request(rid).num_output_tokens < after:
                llm.engine.step()
            force_preempt(llm.engine, rid)
            done = run_bounded(llm.engine, 100)
            assert_same([done[rid]], [cold])


def test_sd_08_greedy_rows_beside_sampled_ones(llm):
    zero = [
        SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, **more)
        for more in ({}, {"seed": 5}, {"top_p": 0.1}, {"top_k": 3})
    ]
    params = [zero[0], WARM, zero[1], WARM, zero[2], zero[3]]
    outputs = llm.generate(["Hello"] * len(params), params)
    greedy = texts(cold_outputs(["Hello"], zero[0]))[0]
    sampled = texts(cold_outputs(["Hello"], WARM))[0]
    assert texts(outputs) == [greedy, sampled, greedy, sampled, greedy, greedy]
    assert greedy != sampled[:10]


def test_min_tokens_keeps_the_end_away(llm):
    (free,) = llm.generate("hello world", SamplingParams(temperature=0.0, max_tokens=20))
    assert list(free.outputs[0].token_ids) == [257]  # the tiny model ends this one at once
    for least in (1, 5, 20):
        (output,) = llm.generate(
            "hello world", SamplingParams(temperature=0.0, max_tokens=20, min_tokens=least)
        )
        ids = list(output.outputs[0].token_ids)
        assert 257 not in ids[:least]
        assert len(ids) >= least
        warm = SamplingParams(
            temperature=5.0, seed=least, max_tokens=60, min_tokens=least, stop_token_ids=list(range(32, 80))
        )
        (output,) = llm.generate("hello world", warm)
        ids = list(output.outputs[0].token_ids)
        assert not any(32 <= token < 80 or token == 257 for token in ids[:least])


def test_min_tokens_leaves_neighbours_and_logprobs_alone(llm):
    plain = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5)
    least = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=4, logprobs=5)
    first, second = llm.generate(["hello world", "hello world"], [plain, least])
    raw, masked = first.outputs[0].logprobs[0], second.outputs[0].logprobs[0]
    assert first.outputs[0].token_ids[0] == 257 != second.outputs[0].token_ids[0]
    for token in set(raw) & set(masked):
        assert raw[token].logprob == pytest.approx(masked[token].logprob, abs=1e-5)
    assert 257 in masked  # log-probabilities are the model's, not those after the mask


def test_logprobs_are_log_softmax_of_the_logits(llm, monkeypatch):
    seen = []
    forward = type(llm.engine.runner._decoder).forward

    def watched(self, inputs, kv):
        logits = forward(self, inputs, kv)
        seen.append(logits.clone())
        return logits

    monkeypatch.setattr(type(llm.engine.runner._decoder), "forward", watched)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, ignore_eos=True)
    (output,) = llm.generate("Hello", params)
    completion = output.outputs[0]
    total = 0.0
    for token, row, logits in zip(completion.token_ids, completion.logprobs, seen, strict=True):
        expected = torch.log_softmax(logits[0].double(), -1)
        top = expected.topk(3).indices.tolist()
        assert set(row) == {*top, token}
        for rank, candidate in enumerate(top, 1):
            assert row[candidate].rank == rank
        for candidate, value in row.items():
            assert value.logprob == pytest.approx(expected[candidate].item(), abs=1e-5)
            assert value.decoded_token == ByteTokenizer().decode([candidate], skip_special_tokens=False)
        if token not in top:
            assert row[token].rank in (None, 1 + int((expected > expected[token]).sum()))
        total += row[token].logprob
    assert completion.cumulative_logprob == pytest.approx(total)
    (only,) = llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=2, logprobs=0))
    assert [len(row) for row in only.outputs[0].logprobs] == [1] * len(only.outputs[0].token_ids)
    (none,) = llm.generate("Hello", GREEDY)
    assert none.outputs[0].logprobs is none.outputs[0].cumulative_logprob is None


def test_a_stop_string_cuts_and_is_never_streamed(llm):
    whole = texts(llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)))[0]
    stop = whole[10:13]
    at = whole.index(stop)
    for keep in (False, True):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=30,
            ignore_eos=True,
            stop=[stop, "\x00"],
            include_stop_str_in_output=keep,
        )
        (output,) = llm.generate("Hello", params)
        assert output.outputs[0].text == whole[: at + 3 * keep]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
        assert "".join(llm.stream("Hello", params)) == whole[: at + 3 * keep]


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"cpu_offload_gb": 1, "swap_space": 4}, "cpu_offload_gb=1.*swap_space=4"),
        ({"enable_prefix_caching": 2}, "enable_prefix_caching=2"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 513}, "block_size=513"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"num_blocks": 1.5}, "num_blocks=1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens=True"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 4096}, "max_model_len=4096: tiny takes at most 2048"),
        ({"num_blocks": 4, "kv_cache_bytes": 1 << 20}, "num_blocks and kv_cache_bytes"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes=1: one block of 16 tokens takes"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5"),
        ({"dtype": "int3"}, "dtype='int3'"),
        ({"seed": "x"}, "seed='x'"),
        ({"device": "nonsense"}, "device='nonsense' cannot be used here .*; use 'cpu'"),
        ({"device": None}, "device=None"),
        ({"watermark": 0.9}, "watermark=0.9"),
    ],
)
def test_bad_options_are_refused_by_name(options, words):
    with pytest.raises(ConfigError, match=words):
        LLM("tiny", **options)


def test_sampling_that_is_not_there_yet_is_refused_by_name():
    names = sys.modules[SamplingParams.__module__]._NOT_YET
    values = {"n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1}
    for name in names:
        with pytest.raises(ConfigError, match=f"{name}=.* is not supported yet"):
            SamplingParams(**{name: values.get(name, 5)})


def test_an_unknown_model_is_named():
    with pytest.raises(ModelError, match="no-such-model"):
        LLM("no-such-model")


def test_sizes_by_bytes():
    with tiny_llm(num_blocks=None, kv_cache_bytes=100_000) as llm:
        kv = llm.engine.runner.kv
        assert llm.engine.config.num_blocks == 100_000 // kv.bytes_per_block
        assert kv.total_bytes <= 100_000


def test_repr_says_what_it_is(llm):
    assert repr(llm) == "LLM(tiny, float32, 128 blocks of 4 tokens, max_model_len=2048)"


def test_vllms_names_are_at_the_top():
    for name in ("LLM", "SamplingParams", "RequestOutput", "CompletionOutput"):
        assert getattr(pagedinfer, name).__name__ == name


# -- the end ----------------------------------------------------------------------------------------------------------


def test_close_twice_and_then_nothing_works():
    llm = tiny_llm()
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    assert list(stream) == []  # its request was aborted
    for call in (lambda: llm.generate("a"), lambda: llm.chat(HELLO), lambda: next(llm.stream("a"))):
        with pytest.raises(EngineClosed):
            call()


def test_nb_10_the_pool_is_freed_by_close_and_by_del():
    for close in (True, False):
        for _ in range(3):
            llm = tiny_llm()
            recorder = pagedinfer.Recorder(llm.engine)
            recorder.start()
            llm.generate(["a", "b"], GREEDY)
            pool, engine = weakref.ref(llm.engine.runner.kv.pool), weakref.ref(llm.engine)
            if close:
                llm.close()
                assert pool() is None  # also while names, recorder and outputs live
            del llm, recorder
            gc.collect()
            assert pool() is None
            assert engine() is None


def test_nb_10_after_an_error_close_frees_the_pool():
    llm = tiny_llm()
    interrupt_at(llm, 2)
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate("Hello", GREEDY)
    pool = weakref.ref(llm.engine.runner.kv.pool)
    llm.close()
    assert pool() is None
    assert caught.value.__traceback__ is not None  # the frames are still held


def test_a_second_engine_beside_the_first():
    with tiny_llm() as first, tiny_llm(block_size=16) as second:
        assert_same(first.generate(["Hello"], GREEDY), second.generate(["Hello"], GREEDY))
        first.close()
        assert len(second.generate(["Hello"], GREEDY)) == 1


# -- async ------------------------------------------------------------------------------------------------------------


def test_agenerate_and_astream_equal_their_twins():
    with tiny_llm(num_blocks=24) as llm:
        prompts, params = ["one", "the second", [259], "three"], SamplingParams(temperature=0.0, max_tokens=9)
        expected = llm.generate(prompts, params)

        async def both():
            outputs, *texts = await asyncio.gather(
                llm.agenerate(prompts, params), *(join(llm.astream(prompts[i], params)) for i in (0, 1, 3))
            )
            return outputs, texts

        async def join(pieces):
            return "".join([piece async for piece in pieces])

        outputs, texts = asyncio.run(both())
        assert [list(o.outputs[0].token_ids) for o in outputs] == [
            list(o.outputs[0].token_ids) for o in expected
        ]
        assert outputs[2].error == expected[2].error
        assert outputs[2].error
        assert texts == [expected[i].outputs[0].text for i in (0, 1, 3)]
        assert_no_leak(llm.engine)


def test_agenerate_of_one_bad_prompt_raises_and_cancelling_aborts():
    with tiny_llm() as llm:
        with pytest.raises(RequestError, match="outside the vocabulary"):
            asyncio.run(llm.agenerate([259], SamplingParams(max_tokens=2)))

        async def cancelled():
            job = asyncio.create_task(
                llm.agenerate(["a", "b"], SamplingParams(max_tokens=500, ignore_eos=True))
            )
            while not llm.engine.scheduler.running:
                await asyncio.sleep(0.005)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            while llm.engine.scheduler.requests:
                await asyncio.sleep(0.005)

        asyncio.run(asyncio.wait_for(cancelled(), 60))
        assert_no_leak(llm.engine)


def test_nb_12_every_synchronous_call_works_inside_a_running_loop():
    async def cell():
        with tiny_llm() as llm:
            params = SamplingParams(temperature=0.0, max_tokens=5)
            whole = llm.generate("hello", params)[0].outputs[0].text
            assert "".join(llm.stream("hello", params)) == whole
            assert (await llm.agenerate("hello", params))[0].outputs[0].text == whole

    asyncio.run(cell())


# -- scripts from elsewhere -------------------------------------------------------------------------------------------


def test_options_of_vllm_that_say_what_happens_anyway_are_accepted():
    with LLM(
        "tiny",
        num_blocks=8,
        tensor_parallel_size=1,
        enforce_eager=True,
        trust_remote_code=False,
        swap_space=0,
    ) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
        assert llm.get_default_sampling_params() == SamplingParams()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 is not supported yet; leave it at 1"),
        ({"quantization": "awq"}, r"quantization='awq' is not supported yet; leave it at None"),
        ({"max_num_seq": 4}, r"does not know max_num_seq=4.*did you mean max_num_seqs\?"),
        ({"colour": "red"}, r"does not know colour='red': it is not an option\.$"),
    ],
)
def test_other_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", num_blocks=8, **options)
