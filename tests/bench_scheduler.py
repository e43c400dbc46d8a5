"""What a decode step costs in the scheduler, by size of pool and queue. Run by hand:

    python tests/bench_scheduler.py [--running 256] [--steps 200]

Prints microseconds for `schedule` and `commit` of a step in which every running request decodes one token, nobody
listens, and the others wait for a seat. The least of several rounds counts: a busy machine only adds.
`test_step_cost` counts what must not grow, without a clock.
"""

import argparse
import gc
import time

from pagedinfer.config import EngineConfig
from pagedinfer.engine.plan import StepResult
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler

POOLS = (1_000, 10_000, 100_000, 1_000_000)
QUEUES = (100, 1_000, 10_000, 100_000)


def decoding(num_blocks, num_waiting, num_running, **config):
    """A scheduler whose seats are taken by requests that decode, with others waiting behind them."""
    settings = {
        "num_blocks": num_blocks, "block_size": 16, "max_model_len": 10**6, "max_num_seqs": num_running,
        "max_num_batched_tokens": max(512, 2 * num_running), "watermark": 0.0,
    } | config  # fmt: skip
    scheduler = Scheduler(EngineConfig(**settings))
    for number in range(num_running + num_waiting):
        request = Request(f"r{number}", 2, 1000, token_ids=[number % 97, number % 89])
        request.tenant = "" if number % 2 else "x"
        scheduler.submit(request, 0.0)
        if number == num_running - 1:
            step(scheduler)
    return scheduler


def step(scheduler):
    """Schedule and commit one step."""
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, StepResult({item.request_id: (7,) for item in plan.scheduled if item.samples}))
    return plan


def microseconds(scheduler, steps):
    """(schedule, commit) of the cheapest step."""
    best = [float("inf"), float("inf")]
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule(0.0)
        planned = time.perf_counter()
        result = StepResult({item.request_id: (7,) for item in plan.scheduled})
        made = time.perf_counter()
        scheduler.commit(plan, result)
        end = time.perf_counter()
        best = [min(best[0], planned - start), min(best[1], end - made)]
    return [1e6 * seconds for seconds in best]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--steps", type=int, default=60, help="steps per size; the cheapest counts")
    args = parser.parse_args()
    print(f"{args.running} requests decode; microseconds of the cheapest of {args.steps} steps")
    print(f"{'blocks':>10} {'waiting':>8} {'schedule':>9} {'commit':>9} {'both':>9}")
    sizes = [(blocks, 100) for blocks in POOLS] + [(10_000, waiting) for waiting in QUEUES]
    for num_blocks, num_waiting in sizes:
        scheduler = decoding(num_blocks, num_waiting, args.running)
        gc.collect()
        gc.disable()
        plan, commit = microseconds(scheduler, args.steps)
        gc.enable()
        print(
            f"{num_blocks:>10} {num_waiting:>8} {plan:>9.0f} {commit:>9.0f} {plan + commit:>9.0f}", flush=True
        )


if __name__ == "__main__":
    main()
