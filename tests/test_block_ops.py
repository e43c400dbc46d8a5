"""Block operations on real tensors: bytes exact, in order, and taken back wherever the run was cut."""

import random
from dataclasses import replace

import pytest
import torch

from pagedinfer.backends.host_pool import HostPool
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.plan import BlockOp, ScheduledRequest, StepPlan, StepResult
from pagedinfer.errors import ConfigError, EngineClosed, RunnerError
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.tiny import TinyWeights
from pagedinfer.runner.block_ops import BlockOps
from pagedinfer.runner.torch_runner import TorchRunner

GREEDY = SamplingParams(temperature=0.0)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int8: torch.int8}


def make_kv(dtype=torch.float32, num_blocks=8):
    """A small pool of random bits: NaNs and infinities must come through as well."""
    kv = KVStorage(num_layers=2, num_blocks=num_blocks, block_size=2, num_kv_heads=1, head_dim=3, dtype=dtype)
    ints = torch.iinfo(BITS[dtype])
    kv.pool.view(BITS[dtype]).random_(ints.min, ints.max)
    return kv


def bits(tensor):
    return tensor.clone().view(BITS[tensor.dtype])


def plan_of(*items, ops=(), overwritten=(), step=1):
    return StepPlan(step, 0.0, 64, list(items), ops=list(ops), overwritten=list(overwritten))


# -- operations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", BITS)
def test_bytes_are_exact_after_out_and_in(dtype):
    kv = make_kv(dtype)
    ops, before = BlockOps(kv, HostPool(3, kv)), bits(kv.pool)
    num_bytes, seconds = ops.run([BlockOp("swap_out", ((5, 2), (1, 0)))])
    assert num_bytes == 2 * kv.bytes_per_block == 2 * kv.pool.nbytes // 8
    assert seconds > 0
    kv.poison()
    assert ops.run([BlockOp("swap_in", ((0, 3), (2, 7)))])[0] == num_bytes
    assert torch.equal(bits(kv.pool)[:, [7, 3]], before[:, [5, 1]])
    poisoned = kv.pool[:, [0, 1, 2, 4, 5, 6]]
    assert (poisoned.isnan() if dtype.is_floating_point else poisoned == 127).all()


@pytest.mark.parametrize("pairs", [[(3, 2), (4, 3), (5, 4)], [(4, 5), (3, 4), (2, 3)], [(1, 6)], [(2, 2)]])
def test_overlapping_moves_run_in_order_and_come_back(pairs):
    kv = make_kv()
    ops, before = BlockOps(kv, HostPool(0, kv)), bits(kv.pool)
    ops.run([BlockOp("move", tuple(pairs))])
    after = bits(kv.pool)
    for source, to in pairs:
        assert torch.equal(after[:, to], before[:, source])
    kv.pool[:, list({source for source, _ in pairs} - {to for _, to in pairs})] = 7.0  # given up, and reused
    ops.take_back()
    for source, _ in pairs:
        assert torch.equal(bits(kv.pool)[:, source], before[:, source])


def test_copies_in_one_operation_see_each_other():
    kv = make_kv()
    before = bits(kv.pool)
    BlockOps(kv, HostPool(0, kv)).run([BlockOp("copy", ((0, 1), (1, 2)))])
    assert torch.equal(bits(kv.pool)[:, [1, 2]], before[:, [0, 0]])


def test_pairs_with_a_destination_in_common_run_in_order():
    kv = make_kv()
    host = HostPool(2, kv)
    ops, before = BlockOps(kv, host), bits(kv.pool)
    ops.run([BlockOp("swap_out", ((0, 0), (1, 1), (2, 0)))])
    assert torch.equal(bits(host.read_out([0, 1])[0]), before[:, [2, 1]])


@pytest.mark.parametrize(
    ("op", "what"),
    [
        (BlockOp("copy", ((0, -1),)), "copy 0 -> -1: there is no block -1, 8 exist"),
        (BlockOp("move", ((8, 0),)), "no block 8"),
        (BlockOp("swap_out", ((0, 2),)), "no host slot 2, 2 exist"),
        (BlockOp("swap_out", ((0, -1),)), "no host slot -1"),
        (BlockOp("swap_in", ((1, 8),)), "no block 8"),
        (BlockOp("teleport", ((1, 2),)), "'teleport' is no block operation"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_nothing_is_done(op, what):
    """OF-06: a copy to a slot that is not there is an error, never taken for done."""
    kv = make_kv()
    ops, before = BlockOps(kv, HostPool(2, kv)), bits(kv.pool)
    with pytest.raises(RunnerError, match=what):
        ops.run([BlockOp("copy", ((0, 1),)), op])
    assert torch.equal(bits(kv.pool), before)


# -- the host pool ----------------------------------------------------------------------------------------------------


class TwoParts(KVStorage):
    """A storage whose blocks consist of two tensors, as a quantized one's do: codes and scales."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        self.scales = torch.rand(self.num_layers, self.num_blocks)

    def read_out(self, block_ids):
        return (*super().read_out(block_ids), self.scales[:, list(block_ids)])

    def write_in(self, block_ids, data):
        super().write_in(block_ids, data[:1])
        self.scales[:, list(block_ids)] = data[1]


def test_every_tensor_of_a_block_moves():
    kv = TwoParts(num_layers=2, num_blocks=4, block_size=2, num_kv_heads=1, head_dim=3, dtype=torch.int8)
    kv.pool.random_(-128, 128)
    pool, scales = kv.pool.clone(), kv.scales.clone()
    host = HostPool(2, kv)
    assert host.total_bytes == 2 * (kv.bytes_per_block + 2 * 4)
    ops = BlockOps(kv, host)
    ops.run([BlockOp("swap_out", ((3, 0), (1, 1)))])
    kv.poison()
    kv.scales.fill_(float("nan"))
    ops.run([BlockOp("swap_in", ((1, 1), (0, 3)))])
    assert torch.equal(kv.pool[:, [1, 3]], pool[:, [1, 3]])
    assert torch.equal(kv.scales[:, [1, 3]], scales[:, [1, 3]])


def test_a_host_pool_of_nothing_and_its_end():
    kv = make_kv()
    host = HostPool(0, kv)
    assert host.total_bytes == 0
    host.close()
    host = HostPool(3, kv)
    assert host.total_bytes == 3 * kv.bytes_per_block
    host.close()
    host.close()
    assert host.total_bytes == 0


def test_a_host_pool_beyond_the_machine_is_a_sentence_with_the_bytes():
    kv = make_kv()
    with pytest.raises(ConfigError, match=r"num_host_blocks=10{14}: .* need [\d,]+ bytes.*ask for fewer"):
        HostPool(10**14, kv)


# -- taking back: random plans, cut everywhere ------------------------------------------------------------------------


class Cut(Exception):
    """What ends a run early."""


class Scissors:
    """Stands in front of a pool; all of a pair's calls are counted, and one of them is cut: before, half way, after."""

    def __init__(self, inner, counter):
        self._inner, self._counter = inner, counter

    def __getattr__(self, name):
        value = getattr(self._inner, name)
        if name not in ("copy", "read_out", "write_in", "read_in"):
            return value

        def call(*args):
            at = self._counter.next()
            if at == "before":
                raise Cut
            if at == "half way" and name == "copy":
                value(args[0][: len(args[0]) // 2])
                raise Cut
            result = value(*args)
            if at:
                raise Cut
            return result

        return call


class Counter:
    def __init__(self, cut_at=None, how=None):
        self.count, self.cut_at, self.how = 0, cut_at, how

    def next(self):
        self.count += 1
        return self.how if self.count - 1 == self.cut_at else None


class Books:
    """Who lives where, and a random plan over it: what a scheduler's books are, in few words."""

    def __init__(self, seed, num_blocks=7, num_slots=4):
        self.random = random.Random(seed)
        live = self.random.sample(range(num_blocks), self.random.randrange(1, num_blocks))
        slots = self.random.sample(range(num_slots), self.random.randrange(num_slots))
        self.before = [("block", b) for b in live] + [
            ("host", s) for s in slots
        ]  # what must be there after a cancel
        self.live = list(self.before)
        self.free = [b for b in range(num_blocks) if b not in live]
        self.free_slots = [s for s in range(num_slots) if s not in slots]
        self.ops, self.overwritten, self.to_write, self.given_up = [], [], [], set()
        for _ in range(self.random.randrange(1, 12)):
            getattr(self, self.random.choice(["drop", "copy", "move", "swap_out", "swap_in", "write"]))()

    def op(self, kind, source, to):
        if self.ops and self.ops[-1].kind == kind and self.random.random() < 0.7:
            self.ops[-1] = replace(self.ops[-1], pairs=(*self.ops[-1].pairs, (source, to)))
        else:
            self.ops.append(BlockOp(kind, ((source, to),)))

    def pick(self, place, unwritten=True):
        here = [w for w in self.live if w[0] == place and not (unwritten and w in self.to_write)]
        return self.random.choice(here) if here else None

    def take(self):
        block_id = self.free.pop(self.random.randrange(len(self.free)))
        if block_id in self.given_up:
            self.overwritten.append(block_id)
        self.live.append(("block", block_id))
        return block_id

    def drop(self):
        """A preemption, or an eviction: the content is given up, not carried away."""
        if where := self.pick("block", unwritten=False):
            self.live.remove(where)
            self.free.append(where[1])
            self.given_up.add(where[1])
            if where in self.to_write:
                self.to_write.remove(where)

    def write(self):
        if self.free:
            self.to_write.append(("block", self.take()))

    def copy(self):
        if self.free and (where := self.pick("block")):
            self.op("copy", where[1], self.take())

    def move(self):
        if self.free and (where := self.pick("block")):
            self.op("move", where[1], self.take())
            self.live.remove(where)
            self.free.append(where[1])

    def swap_out(self):
        if self.free_slots and (where := self.pick("block")):
            self.live.remove(where)
            self.live.append(("host", self.free_slots.pop()))
            self.op("swap_out", where[1], self.live[-1][1])
            self.free.append(where[1])

    def swap_in(self):
        if self.free and (where := self.pick("host")):
            self.op("swap_in", where[1], self.take())
            self.live.remove(where)  # its slot is not handed out again before the commit


def cancelled_after_a_cut(books, cut_at, how, overwritten):
    """Run the plan, cut it, take it back. Returns what is wrong afterwards, and how many calls there were."""
    kv, counter = make_kv(), Counter(cut_at, how)
    host = HostPool(4, kv)
    host.read_in(range(4), make_kv().read_out(range(4)))
    before = {"block": bits(kv.pool), "host": bits(host.read_out(range(4))[0])}
    ops = BlockOps(Scissors(kv, counter), Scissors(host, counter))
    try:
        ops.run(books.ops, overwritten)
    except Cut:
        pass  # it has taken itself back
    else:
        kv.pool[:, [block_id for _, block_id in books.to_write]] = float(
            "nan"
        )  # the forward pass, then it fails
        try:
            ops.take_back()
        except Cut:  # it was the taking back that was cut
            ops.take_back()
    after = {"block": bits(kv.pool), "host": bits(host.read_out(range(4))[0])}
    return [
        (place, number)
        for place, number in books.before
        if not torch.equal(after[place][:, number], before[place][:, number])
    ], counter.count


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)])
def test_wherever_a_plan_is_cut_a_cancel_finds_the_data_where_the_books_say(seeds):
    for seed in seeds:
        books = Books(seed)
        wrong, num_calls = cancelled_after_a_cut(books, None, None, books.overwritten)
        assert not wrong, (seed, books.ops, books.overwritten)
        for cut_at in range(num_calls):
            for how in ("before", "half way", "after"):
                wrong, _ = cancelled_after_a_cut(books, cut_at, how, books.overwritten)
                assert not wrong, (seed, cut_at, how, books.ops, books.overwritten)


def test_the_random_plans_need_what_is_kept():
    """The test above can fail: without `overwritten` content is lost, and the plans have every kind of operation."""
    plans = [Books(seed) for seed in range(200)]
    assert {op.kind for books in plans for op in books.ops} == {"copy", "move", "swap_out", "swap_in"}
    assert sum(bool(cancelled_after_a_cut(books, None, None, ())[0]) for books in plans) > 10


def test_a_taking_back_that_is_cut_goes_on_the_next_time():
    for cut_at in range(3, 6):
        kv, counter = make_kv(), Counter()
        before = bits(kv.pool)
        ops = BlockOps(Scissors(kv, counter), HostPool(0, kv))
        ops.run([BlockOp("move", ((3, 2), (4, 3), (5, 4)))])
        assert counter.count == 3
        counter.cut_at, counter.how = cut_at, "after"
        with pytest.raises(Cut):
            ops.take_back()
        ops.take_back()
        assert torch.equal(bits(kv.pool)[:, 3:6], before[:, 3:6])


# -- in the runner ----------------------------------------------------------------------------------------------------


class Failing:
    """A decoder that raises `error` once, after it has written the step's keys and values."""

    def __init__(self, decoder):
        self._decoder, self.error = decoder, None

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def forward(self, inputs, kv):
        logits = self._decoder.forward(inputs, kv)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return logits


@pytest.fixture(scope="module")
def decoder():
    source = TinyWeights(seed=2)
    return Decoder(source.config).load(source)


@pytest.fixture
def runner(decoder):
    runner = TorchRunner(Failing(decoder), num_blocks=8, block_size=4, num_host_blocks=4)
    runner.kv.poison()
    yield runner
    runner.close()


def item(token_ids, table, *, rid="a", start=None):
    start = len(token_ids) - 1 if start is None else start
    return ScheduledRequest(
        rid, start, len(token_ids) - start, True, 0, start == 0, (), table, token_ids, GREEDY, 0
    )


PROMPT, OTHER = list(range(60, 70)), list(range(80, 90))


def extend(runner, token_ids, table, count=1):
    for _ in range(count):
        result = runner.execute(plan_of(item(token_ids, table)))
        token_ids = [*token_ids, *result.tokens["a"]]
    return token_ids


@pytest.fixture
def started(runner):
    """After the prompt: the tokens so far, in blocks 0, 1, 2."""
    return [*PROMPT, *runner.execute(plan_of(item(PROMPT, [0, 1, 2], start=0))).tokens["a"]]


def test_swapping_moving_and_resizing_leave_the_tokens_as_they_are(runner, started):
    want = extend(runner, started, [0, 1, 2, 3], 5)
    kv = runner.kv
    assert runner.run_ops([BlockOp("swap_out", ((0, 3), (1, 1), (2, 0)))])[0] == 3 * kv.bytes_per_block
    kv.poison()
    plan = plan_of(item(started, [7, 5, 6]), ops=[BlockOp("swap_in", ((3, 7), (1, 5), (0, 6)))])
    result = runner.execute(plan)
    assert result.op_bytes == 3 * kv.bytes_per_block
    assert result.op_seconds > 0
    assert result.seconds > 0
    got = [*started, *result.tokens["a"]]
    runner.run_ops([BlockOp("move", ((5, 0), (6, 1), (7, 2)))])
    runner.resize(3)
    assert kv.num_blocks == 3
    assert kv.total_bytes == 3 * kv.bytes_per_block
    got = extend(runner, got, [2, 0, 1])
    runner.resize(10)
    kv.pool[:, 3:] = float("nan")
    assert extend(runner, got, [2, 0, 1, 9], 3) == want


def test_a_plan_of_operations_alone_is_carried_out(runner, started):
    result = runner.execute(plan_of(ops=[BlockOp("copy", ((0, 4),)), BlockOp("swap_out", ((4, 0),))]))
    assert result.tokens == {}
    assert result.op_bytes == 2 * runner.kv.bytes_per_block
    assert torch.equal(runner.kv.pool[:, 4], runner.kv.pool[:, 0])


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_forward_pass_that_fails_gives_the_data_back(runner, started, error):
    """The plan moves a block, swaps one out, evicts one and writes to all three; then it fails."""
    before = bits(runner.kv.pool[:, [0, 1, 2]])
    ops = [BlockOp("move", ((0, 4),)), BlockOp("swap_out", ((1, 0),))]
    plan = plan_of(item(OTHER, [0, 1, 2], rid="b", start=0), ops=ops, overwritten=[2])
    runner._decoder.error = error
    with pytest.raises(type(error)):
        runner.execute(plan)
    assert torch.equal(bits(runner.kv.pool[:, [0, 1, 2]]), before)
    runner.take_back(plan)  # once more, as the engine does
    assert torch.equal(bits(runner.kv.pool[:, [0, 1, 2]]), before)


def test_a_plan_cancelled_after_it_ran_gives_the_data_back(runner, started):
    before = bits(runner.kv.pool[:, [0, 1, 2]])
    plan = plan_of(item(OTHER, [0, 1, 2], rid="b", start=0), ops=[BlockOp("move", ((0, 4), (1, 5), (2, 6)))])
    runner.execute(plan)
    runner.take_back(replace(plan))  # another plan
    assert not torch.equal(bits(runner.kv.pool[:, 4:7]), bits(runner.kv.pool[:, :3]))
    runner.take_back(plan)
    assert torch.equal(bits(runner.kv.pool[:, [0, 1, 2]]), before)


def test_what_was_committed_is_never_taken_back(runner, started):
    first = plan_of(ops=[BlockOp("move", ((0, 4),))])
    runner.execute(first)
    runner.kv.pool[:, 0] = 5.0  # its next owner
    runner._decoder.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        runner.execute(plan_of(item(started, [4, 1, 2]), step=2))
    assert (runner.kv.pool[:, 0] == 5.0).all()
    runner.run_ops([])
    runner.take_back(first)
    assert (runner.kv.pool[:, 0] == 5.0).all()


def test_an_interrupt_before_a_plan_begins_takes_nothing_back(runner, started):
    class Interrupted:
        scheduled = ()

        @property
        def ops(self):
            raise KeyboardInterrupt

    runner.execute(plan_of(ops=[BlockOp("move", ((0, 4),))]))  # and it is committed
    runner.kv.pool[:, 0] = 5.0
    plan = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        runner.execute(plan)
    runner.take_back(plan)
    assert (runner.kv.pool[:, 0] == 5.0).all()


def test_operations_between_steps_are_all_done_or_none(runner, started):
    before = bits(runner.kv.pool)
    with pytest.raises(RunnerError, match="no host slot 4"):
        runner.run_ops([BlockOp("move", ((0, 4),)), BlockOp("swap_out", ((4, 4),))])
    assert torch.equal(bits(runner.kv.pool), before)


def test_a_new_size_beyond_the_machine_leaves_the_pool_as_it_was(runner, started):
    before = bits(runner.kv.pool)
    with pytest.raises(ConfigError, match="more than this machine gives"):
        runner.resize(10**14)
    assert runner.kv.num_blocks == 8
    assert torch.equal(bits(runner.kv.pool), before)


def test_a_pool_resized_inside_inference_mode_can_be_written_outside_of_it(runner):
    with torch.inference_mode():
        runner.resize(5)
    runner.kv.poison()
    runner.kv.write_in([0], runner.kv.read_out([1]))


def test_after_close_it_says_so(decoder):
    runner = TorchRunner(decoder, num_blocks=4, block_size=4, num_host_blocks=2)
    runner.close()
    for call in [
        lambda: runner.execute(plan_of(ops=[BlockOp("copy", ((0, 1),))])),
        lambda: runner.run_ops([BlockOp("copy", ((0, 1),))]),
        lambda: runner.resize(5),
    ]:
        with pytest.raises(EngineClosed):
            call()
    runner.take_back(plan_of())


def test_the_engine_takes_operations_back_when_the_answer_does_not_fit(decoder):
    """The runner did its work; the engine refuses its answer and cancels."""

    class Wrong(TorchRunner):
        def execute(self, plan):
            plan.ops.append(BlockOp("move", ((7, 6),)))  # a scheduler that moves blocks, in short
            super().execute(plan)
            self.kv.pool[:, 7] = 0.0
            return StepResult({"stranger": (1,)})

    runner = Wrong(decoder, num_blocks=8, block_size=4)
    runner.kv.pool[:, 7] = 3.0
    with Engine(EngineConfig(num_blocks=8, block_size=4), runner) as engine:
        engine.add_request([1, 2, 3])
        before = engine.snapshot()
        with pytest.raises(RunnerError, match="stranger"):
            engine.step()
        assert engine.snapshot() == before
        assert (runner.kv.pool[:, 7] == 3.0).all()
