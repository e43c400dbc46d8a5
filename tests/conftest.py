"""Fixtures that several test files share: simulated runs, and a real browser."""

import os
import random
import shutil
import signal
from pathlib import Path

import pytest

# Before torch is loaded: see pagedinfer/__init__.py.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts pytest in the background makes it ignore Ctrl-C; the tests of interrupts need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from pagedinfer.config import EngineConfig, SamplingParams
from pagedinfer.engine.plan import ScheduledRequest, StepPlan
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.sim.simulated import SimulatedRunner
from pagedinfer.trace.events import SCHEMA, Meta
from pagedinfer.trace.recording import Recording


class SimulatedRun:
    """The real scheduler and pool over simulated tokens: seeded arrivals, aborts, cancelled plans."""

    def __init__(
        self, *, seed=1, requests=14, prompts=(8, 120), outputs=(4, 60), cancels=0.05, aborts=0.02, **config
    ):
        settings = {
            "num_blocks": 64,
            "block_size": 16,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
        } | config
        settings.setdefault("max_model_len", settings["num_blocks"] * settings["block_size"])
        self.scheduler = Scheduler(EngineConfig(**settings))
        self.recording = Recording()
        meta = Meta(SCHEMA, self.scheduler.config.to_dict())
        meta.step = 0
        self.recording.add(meta)
        self.scheduler.bus.subscribe(self.recording.add)
        self._random, self._runner = random.Random(seed), SimulatedRunner()
        self._left, self._prompts, self._outputs = requests, prompts, outputs
        self._cancels, self._aborts = cancels, aborts
        for _ in range(3):
            self._submit()

    def _submit(self):
        if self._left:
            self._left -= 1
            number = self.scheduler.queues.num_submitted + 1
            lengths = self._random.randint(*self._prompts), self._random.randint(*self._outputs)
            self.scheduler.submit(Request(f"R{number}", *lengths, seed=number), self.scheduler.step)

    def advance(self):
        """One step. Returns whether there is more to do."""
        scheduler, chance = self.scheduler, self._random.random
        if not self.unfinished:
            return False
        if scheduler.step % 3 == 2:
            self._submit()
        if chance() < self._aborts and scheduler.requests:
            scheduler.abort(self._random.choice(list(scheduler.requests)))
        plan = scheduler.schedule(scheduler.step)
        if chance() < self._cancels:
            scheduler.cancel(plan)
            plan = scheduler.schedule(scheduler.step)
        scheduler.commit(plan, self._runner.execute(plan))
        return self.unfinished

    @property
    def unfinished(self):
        """Whether requests are live or still to come."""
        return bool(self.scheduler.requests or self._left)

    def finish(self):
        """Run to the end and return the recording."""
        while self.advance():
            pass
        return self.recording


@pytest.fixture(scope="session")
def simulated_run():
    return SimulatedRun


@pytest.fixture(scope="session")
def everything():
    from made_films import everything

    return everything()


@pytest.fixture(scope="session")
def huge_pool():
    from made_films import huge_pool

    return huge_pool


@pytest.fixture(scope="session")
def crowd():
    from made_films import crowd

    return crowd


@pytest.fixture(scope="module")
def one_thread():
    """Tiny models gain nothing from more threads of torch's, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


CHROMIUM_ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")  # not longer: while Playwright runs, asyncio.run() fails in this thread
def chromium():
    """A running Chromium, driven by Playwright."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (extra: test)"
    )
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium on PATH (Debian: apt install chromium)")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=CHROMIUM_ARGS)
        yield browser
        browser.close()


@pytest.fixture
def new_page(chromium):
    """Opens pages that note console errors (`page.errors`) and requests to other machines (`page.external`)."""
    contexts = []

    def open_page(width=1280, height=1000, scheme="light", **options):
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,
            reduced_motion="reduce",
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        page.errors, page.external = [], []
        page.on("console", lambda m: page.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.errors.append(f"{error}"))
        far = ("http:", "https:", "ws:", "wss:")
        for kind in ("request", "websocket"):
            page.on(
                kind,
                lambda r: (
                    page.external.append(r.url)
                    if r.url.startswith(far) and "//127.0.0.1:" not in r.url
                    else None
                ),
            )
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    """Folder for screenshots: PI_ARTIFACTS, or a temporary one."""
    folder = Path(os.environ.get("PI_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- models of transformers, and our decoders over a paged pool ----------------------------------------------------


def _spread(config, seed=0):
    """A random model of transformers whose logits spread, and in which norms, biases and routers all matter."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    plus_one = config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise, inputs = torch.randn(weight.shape), weight.shape[0 if config.model_type == "gpt2" else -1]
            if weight.dim() == 1 and ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                noise = 0.3 * noise + (0.0 if plus_one else 1.0)
            elif name.endswith("bias") or "wpe" in name:
                noise *= 0.5
            elif any(part in name for part in ("embed", "lm_head", "wte")):
                noise *= 3.5 / weight.shape[-1] ** 0.5
            else:
                sharp = any(part in name for part in ("q_proj", "k_proj", "qkv", "c_attn"))
                noise *= (1.7 if sharp else 2.5) / inputs**0.5
            weight.copy_(noise)
    return model


class PagedBatch:
    """Prompts computed by our decoder over one poisoned pool with scattered blocks; all logits are kept."""

    def __init__(self, decoder, prompts, *, block_size=4, seed=0):
        from pagedinfer.runner.inputs import InputBuffers

        self._decoder, self._prompts = decoder, prompts
        self._buffers = InputBuffers(block_size)
        self.logits = [[] for _ in prompts]
        blocks = [-(-len(tokens) // block_size) for tokens in prompts]
        ids = list(range(sum(blocks) + 5))
        random.Random(seed).shuffle(ids)
        self._tables = [[ids.pop() for _ in range(count)] for count in blocks]
        self._kv = decoder.new_kv(sum(blocks) + 5, block_size)
        self._kv.poison()

    def step(self, *counts):
        """Compute the next `counts[i]` tokens of prompt i (fewer where it ends), 0 to leave it out."""
        import torch

        items = []
        for row, (count, tokens) in enumerate(zip(counts, self._prompts, strict=True)):
            start = len(self.logits[row])
            count = min(count, len(tokens) - start)
            if count:
                items.append(
                    ScheduledRequest(
                        request_id=str(row), start=start, num_tokens=count, samples=True, output_index=0,
                        is_prefill=True, new_block_ids=(), block_table=self._tables[row], token_ids=tokens,
                        params=SamplingParams(), seed=0,
                    )
                )  # fmt: skip
        inputs, items = self._buffers.update(
            StepPlan(step=1, now=0, token_budget=sum(counts), scheduled=items)
        )
        inputs.logits_indices = torch.arange(sum(inputs.query_lens))
        logits = self._decoder.forward(inputs, self._kv).split(inputs.query_lens)
        for item, part in zip(items, logits, strict=True):
            self.logits[int(item.request_id)] += list(part)

    def finish(self, chunk):
        """Compute the rest, `chunk` tokens of each prompt a step. Returns each prompt's logits [tokens, vocabulary]."""
        import torch

        while any(len(done) < len(tokens) for done, tokens in zip(self.logits, self._prompts, strict=True)):
            self.step(*[chunk] * len(self._prompts))
        return [torch.stack(parts) for parts in self.logits]


@pytest.fixture(scope="session")
def random_model():
    return _spread


@pytest.fixture(scope="session")
def paged_batch():
    return PagedBatch
