"""`LLM`: load a model, give prompts, get texts. The offline interface, with vLLM's names."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagedinfer.arguments import (
    is_single,
    no_progress,
    one_each,
    progress,
    read_conversation,
    refuse_unsupported,
)
from pagedinfer.async_engine import AsyncEngine
from pagedinfer.config import BeamSearchParams, EngineConfig, SamplingParams
from pagedinfer.engine.beam_search import BeamSearchOutput, beam_search
from pagedinfer.engine.completion import complete, refused
from pagedinfer.engine.engine import Engine
from pagedinfer.engine.intake import Prompt
from pagedinfer.engine.output import RequestOutput
from pagedinfer.engine.policy import Policy
from pagedinfer.errors import ConfigError, RequestError, readable
from pagedinfer.runner.load import check_device, load_model
from pagedinfer.runner.pool_size import check_pool_size, choose_num_blocks
from pagedinfer.runner.structured import StructuredOutputs
from pagedinfer.runner.torch_runner import TorchRunner

__all__ = ["LLM"]

Message = Mapping[str, Any]


class LLM:
    """A model behind an engine.

    Args:
        model: "smollm2-135m", "tiny" (seeded random weights, no download), a folder with `config.json` and
            safetensors, a `.gguf` file, or a hub id. A folder whose architecture is none of ours runs through the
            modules of transformers, where those are installed and can use paged attention.
        dtype: "auto", "bfloat16", "float16" or "float32". "auto" is float32 on a CPU, so that outputs agree on every
            machine; bfloat16 takes half the memory and often half the time.
        max_model_len: the most tokens of a request; default the model's own limit, or where a model changes its
            rotary positions beyond some length (longrope) that length.
        block_size: tokens per KV block, 1 to 512.
        num_blocks, kv_cache_bytes, gpu_memory_utilization: the KV pool's size in blocks, in bytes, or as the share
            of memory (of the machine's, on a CPU) that weights and pool take together; at most one of them.
        seed: seed of requests that have none of their own.
        device: "cpu", or a device of torch.
        policy: a class made from `Policy`: it decides instead of the policies that options name.
        options: every other setting of `EngineConfig` by its name: max_num_seqs, max_num_batched_tokens, watermark,
            enable_prefix_caching, num_host_blocks, preempt_mode, order, num_draft_tokens, ...

    Attributes:
        engine: the engine: `add_request`, `step`, `abort`, `snapshot`, `metrics`, ...
        tokenizer: text to ids and back.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        seed: int | None = 0,
        device: str = "cpu",
        policy: Callable[[EngineConfig], Policy] | None = None,
        **options: Any,
    ) -> None:
        """Load the model and make the engine.

        Raises:
            ConfigError: an option is unknown, out of range or not supported yet.
            ModelError: the model cannot be found, fetched or used.
        """
        known = {f.name for f in fields(EngineConfig)} - {"group_windows"}
        settings = {name: options.pop(name) for name in sorted(known & options.keys())}
        refuse_unsupported(options, [*inspect.signature(LLM.__init__).parameters, *sorted(known)])
        # All that needs no model is checked before one is loaded.
        EngineConfig(
            num_blocks=1 if num_blocks is None else num_blocks,
            block_size=block_size,
            max_model_len=1 if max_model_len is None else max_model_len,
            **settings,
        )
        check_pool_size(
            num_blocks=num_blocks, kv_cache_bytes=kv_cache_bytes, memory_share=gpu_memory_utilization
        )
        if policy is not None and not (
            issubclass(policy, Policy) if isinstance(policy, type) else callable(policy)
        ):
            raise ConfigError(
                f"policy={policy!r:.80}: give a class made from Policy; it is made with the settings."
            )
        SamplingParams(seed=seed)
        check_device(device)
        loaded = load_model(model, dtype=dtype, device=device, max_model_len=max_model_len)
        self.tokenizer = loaded.tokenizer
        # Layers with a window let go of blocks that others keep, where requests may outgrow it.
        groups = loaded.model.layer_groups
        windows = [window for window in groups.windows if window is not None]
        grouped = (
            settings.get("allocator", "paged") == "paged"
            and min(windows, default=1 << 60) < loaded.max_model_len
        )
        num_blocks = choose_num_blocks(
            bytes_per_block=loaded.model.new_kv(1, block_size, groups if grouped else None).bytes_per_block,
            block_size=block_size,
            max_model_len=loaded.max_model_len,
            max_num_seqs=settings.get("max_num_seqs", 64),
            weight_bytes=loaded.model.nbytes,
            device=loaded.model.device,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            memory_share=gpu_memory_utilization,
        )
        config = EngineConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=loaded.max_model_len,
            group_windows=groups.windows if grouped else (None,),
            **settings,
        )
        self.engine = Engine(
            config,
            TorchRunner(
                loaded.model,
                num_blocks=num_blocks,
                block_size=block_size,
                num_host_blocks=config.num_host_blocks,
                grouped=grouped,
            ),
            policy=None if policy is None else policy(config),
            tokenizer=self.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            seed=seed or 0,
            wall_clock=time.perf_counter,
            make_mask=StructuredOutputs(self.tokenizer, loaded.config.vocab_size, loaded.eos_token_ids),
            info={
                "model": Path(model).name if Path(model).exists() else model,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "device": device,
                "modules": loaded.modules,
            },
        )
        self._async = AsyncEngine(self.engine)

    # -- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: one output each, in order.

        Args:
            prompts: text, a list of token ids, {"prompt_token_ids": ids}, or a list of such.
            sampling_params: for all of them, or a list with one for each.
            use_tqdm: show progress on a terminal (the name is vLLM's).

        Raises:
            RequestError: a single prompt cannot be used. In a list the others go on, and the bad one's output has
                `finish_reason="error"` and `error`.
            ConfigError: the parameters do not suit the model, or their number differs from the prompts'.
        """
        single = is_single(prompts)
        listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        return self._complete(listed, sampling_params, single=single, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of prompts, `beam_width` of each, best first; one output each, in order.

        Beams are forked requests: they share the blocks of what they have in common.

        Raises:
            RequestError: a single prompt cannot be used. In a list the others go on, and the bad one's output has
                `error` and no sequences.
            ConfigError: not `BeamSearchParams`, or more beams than `max_num_seqs`.
        """
        single = is_single(prompts)
        listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        return beam_search(self.engine, listed, params, single=single, decode=self.tokenizer.decode)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of {"role", "content"}) or several. The model's own template is used.

        A content is text, or a list of OpenAI's text parts, {"type": "text", "text": ...}, each on a line of its own.

        Raises:
            RequestError: a single conversation is empty, or the template refuses it. Among several the others go on,
                and the bad one's output has `finish_reason="error"` and `error`.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise RequestError(
                f'Messages are a {type(messages).__name__}; give a list of {{"role", "content"}}, or several.'
            )
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        prompts: list[Prompt | RequestError] = []
        for conversation in conversations:
            try:
                prompts.append({"prompt_token_ids": self._render(conversation, add_generation_prompt)})
            except RequestError as error:
                prompts.append(error)
        return self._complete(prompts, sampling_params, single=single, use_tqdm=use_tqdm)

    def _render(self, conversation: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        rendered: list[int] = self.tokenizer.apply_chat_template(
            read_conversation(conversation), add_generation_prompt=add_generation_prompt
        )
        return rendered

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Pieces of one prompt's text as they come; together they are the whole text.

        Closing the generator aborts the request.

        Raises:
            RequestError: the prompt cannot be used. ConfigError: several outputs are asked for.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.num_children > 1:
            raise ConfigError(
                f"stream gives one text and n={sampling_params.n}, best_of={sampling_params.best_of} ask for several "
                "outputs; use generate, or engine.add_request and engine.step."
            )
        shown = 0
        with closing(complete(self.engine, [prompt], [sampling_params], single=True)) as steps:
            for _, output in steps:
                if output.error:
                    raise RequestError(output.error)
                text = output.outputs[0].text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for async code: the steps run in a worker thread, so the event loop stays free.

        Cancelling the task aborts its requests. Raises as `generate` does.
        """
        single = is_single(prompts)
        listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item, arg-type]
        params = one_each(sampling_params, len(listed))
        jobs = [
            asyncio.ensure_future(self._async.generate(prompt, wanted))
            for prompt, wanted in zip(listed, params, strict=True)
        ]
        try:
            done = await asyncio.gather(*jobs, return_exceptions=not single)
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        outputs = []
        for place, result in enumerate(done):
            if isinstance(result, BaseException):
                if not isinstance(result, RequestError):
                    raise result
                result = refused(listed[place], place, str(result))
            outputs.append(result)
        return outputs

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[str, None]:
        """`stream` for async code: pieces of the text as they come; a slow reader gets longer pieces.

        Leaving the loop over it aborts the request. Raises as `stream` does.
        """
        shown = 0
        async with aclosing(self._async.stream(prompt, sampling_params)) as outputs:
            async for output in outputs:
                if output.error:
                    raise RequestError(output.error)
                text = output.outputs[0].text
                if len(text) > shown:
                    yield text[shown:]
                    shown = len(text)

    def _complete(
        self,
        prompts: Sequence[Prompt | RequestError],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        single: bool,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        done: dict[int, RequestOutput] = {}
        show = progress(len(prompts)) if use_tqdm else no_progress
        each = one_each(params, len(prompts))
        with closing(complete(self.engine, prompts, each, single=single)) as steps:
            for place, output in steps:
                if output.finished:
                    done[place] = output
                    show(len(done))
        return [done[place] for place in range(len(prompts))]

    def get_tokenizer(self) -> Any:
        """The tokenizer, under vLLM's name for it."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses."""
        return SamplingParams()

    # -- the end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the KV pool and the model. Harmless when called twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        info, config = self.engine.describe()["info"], self.engine.config
        through = "" if info["modules"] == "pagedinfer" else f" through {info['modules']}"
        return readable(
            f"LLM({info['model']}{through}, {info['dtype']}, {config.num_blocks} blocks of {config.block_size} tokens, "
            f"max_model_len={config.max_model_len})"
        )
