"""Random traffic on tiny models of several families, with everything that can go wrong going wrong: `torture.py`."""

import pytest
import torture
from torture import FAMILIES, NUM_CASES, Traffic, case, cold, run

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", FAMILIES)
def test_random_traffic(family):
    traffic = run(list(FAMILIES).index(family), 800, family=family)
    assert traffic.counts["same"] > 10, traffic.counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 125))
def test_more_random_traffic(seed):
    run(seed)


def test_traffic_reaches_what_it_is_for():
    """A pool, budget and batch that meet everything: else the other runs prove little."""
    options = {
        "block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 8, "admission": "fits-now",
        "expected_output_tokens": None, "max_num_waiting": None, "tenant_max_running": None, "tenant_max_blocks": None,
    }  # fmt: skip
    traffic = run(2, 1_200, family="llama", watermark=0.0, **options)
    kinds = {event.kind for event in traffic.recording.events}
    assert {"preempt", "resume", "refuse", "cancel", "abort", "reject", "error", "finish"} <= kinds
    steps = [event for event in traffic.recording.events if event.kind == "step"]
    assert any(len(event.scheduled) > 4 for event in steps)
    assert any(event.why != "forced" for event in traffic.recording.events if event.kind == "preempt")
    assert traffic.counts["same"] > 100
    for kind in ("aborted", "sick", "streams closed", "subscribers"):
        assert traffic.counts[kind] >= 4, traffic.counts


def test_the_cases_ask_for_everything():
    params = [case(number)[1] for number in range(NUM_CASES)]
    for name in ("logit_bias", "bad_words", "allowed_token_ids", "token_mask", "structured_outputs", "stop",
                 "stop_token_ids", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens", "has_penalties",
                 "repetition_penalty", "is_greedy", "include_stop_str_in_output"):  # fmt: skip
        values = [getattr(how, name) for how in params]
        assert min(map(len, (set(map(repr, values)), values))) > 1, name
    assert {how.n for how in params} == {1, 2, 3}
    alone = [cold("llama", number, 0).outputs[0] for number in range(0, NUM_CASES, 4)]
    assert {output.finish_reason for output in alone} == {"stop", "length"}


def wrong_token(result):
    rid, (token,) = next(iter(result.tokens.items()))
    result.tokens[rid] = ((token + 1) % 256,)


def wrong_neighbour(result):
    rid = next(iter(result.tokens))
    del result.tokens[rid]
    result.errors[rid] = "made up"


@pytest.mark.parametrize("fault", [wrong_token, wrong_neighbour])
def test_a_fault_names_its_seed(monkeypatch, fault):
    """The harness can fail: one wrong answer in one step of one request is found, and the message holds the seed."""
    execute = Traffic.execute

    def wrong(self, real, plan):
        result = execute(self, real, plan)
        if plan.step == 20 and result.tokens:
            fault(result)
        return result

    monkeypatch.setattr(Traffic, "execute", wrong)
    with pytest.raises(AssertionError, match="seed 3, step"):
        run(3, 60, family="llama")


def test_a_seed_gives_the_same_again():
    def recorded(**options):
        return run(8, 60, **options).recording.to_jsonl(wall=False)

    assert recorded() == recorded()


def test_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torture.py", "--seed", "5", "--steps", "30"])
    torture.main()
    assert capsys.readouterr().out.startswith("seed 5 ")
