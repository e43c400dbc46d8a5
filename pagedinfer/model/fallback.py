"""Families that the decoder does not compute, through the modules of transformers over our KV pool.

transformers lets anyone register an attention function (`AttentionInterface`). Ours writes a layer's keys and
values into our blocks and attends with our op; all else is their module, which sees the step's tokens as one row
with positions. Whether that gives their own logits is tried on a few tokens before the model is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pagedinfer.backends.foreign_attention import STEP, ForeignStep, foreign_attention
from pagedinfer.backends.kv_storage import KVStorage
from pagedinfer.backends.layer_groups import LayerGroups
from pagedinfer.backends.model_inputs import ModelInputs
from pagedinfer.errors import ModelError
from pagedinfer.model.checked import config_error, printable, read_json, shown, whole
from pagedinfer.model.config_fields import eos_ids
from pagedinfer.model.families import FAMILIES
from pagedinfer.model.folder import folder_name
from pagedinfer.model.weights import list_names

__all__ = ["FallbackConfig", "FallbackModel", "FallbackSource"]

_NAME = "pagedinfer"
_MOST = 10_000  # layers, or experts of one
_CHANGING_ROTARY = ("dynamic", "longrope")  # angles that depend on the longest request of the batch


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackConfig:
    """What is known of a model that transformers computes."""

    architecture: str
    name: str
    vocab_size: int
    num_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str

    @property
    def usual_max_len(self) -> int:
        """The most tokens of a request where nobody asks for more."""
        return self.max_position_embeddings


class FallbackSource:
    """A folder whose architecture the decoder does not compute, checked as far as its config tells.

    Raises:
        ModelError: transformers is missing, does not know the architecture or cannot use our attention for it.
    """

    def __init__(self, path: Path) -> None:
        raw = read_json(path / "config.json")
        self._path, self._name = path, printable(folder_name(path, raw))
        self._architecture = str(raw.get("model_type"))
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise self.refusal(
                "transformers, which may, is not installed: pip install transformers"
            ) from error
        try:
            theirs = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # what a stranger's config makes of a stranger's code
            raise self.refusal(f"transformers does not read its config ({_first_line(error)})") from error
        text = theirs.get_text_config()
        self._check(text)
        try:
            with torch.device("meta"):  # no memory, no weights
                outline = AutoModelForCausalLM.from_config(theirs)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise self.refusal(f"transformers has no such causal model ({_first_line(error)})") from error
        if not outline.is_backend_compatible():
            raise self.refusal("its module in transformers does not use the attention interface")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        self.config = FallbackConfig(
            architecture=self._architecture,
            name=self._name,
            vocab_size=whole(text.vocab_size, "vocab_size", low=1),
            num_layers=whole(text.num_hidden_layers, "num_hidden_layers", low=1),
            max_position_embeddings=whole(
                getattr(text, "max_position_embeddings", None), "max_position_embeddings", low=1
            ),
            eos_token_ids=eos_ids(text.eos_token_id, generation.get("eos_token_id")),
            dtype=str(text.dtype or "float32").removeprefix("torch."),
        )
        outside = [token for token in self.config.eos_token_ids if token >= self.config.vocab_size]
        if outside:
            raise self.refusal(f"its end token {outside[0]} is outside its vocabulary of {text.vocab_size}")

    def close(self) -> None:
        """Nothing to close."""

    def refusal(self, reason: str) -> ModelError:
        """The error that names the architecture, why it cannot be used, and what can."""
        return config_error(
            self._name,
            f"has architecture {shown(self._architecture)}, which cannot be used: {reason}. Computed here: "
            f"{', '.join(FAMILIES)}; through transformers: decoders that attend by its attention interface",
        )

    def _check(self, text: Any) -> None:
        """Refuse what our attention cannot stand in for, where the config already says so."""
        for key, value in text.to_dict().items():  # a claim for which modules would be made
            counts = ("layer" in key or "expert" in key) and "size" not in key
            if counts and isinstance(value, int) and value > _MOST:
                raise self.refusal(f"{key} is {value}; at most {_MOST} are computed")
        kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
        if kinds:
            raise self.refusal(f"it has layers of type {shown(sorted(kinds)[0])}")
        if getattr(text, "attention_chunk_size", None):
            raise self.refusal("its attention is cut into chunks (attention_chunk_size)")
        rotary = getattr(text, "rope_parameters", None) or {}
        for part in (rotary, *(inner for inner in rotary.values() if isinstance(inner, dict))):
            if part.get("rope_type") in _CHANGING_ROTARY:
                raise self.refusal(
                    f"its {part['rope_type']} rotary positions change with the longest request"
                )

    def load(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> FallbackModel:
        """Load the weights and try our attention in place of theirs.

        Raises:
            ModelError: the checkpoint is damaged, or logits differ.
        """
        from transformers import AutoModelForCausalLM

        try:
            made: Any = AutoModelForCausalLM.from_pretrained(
                self._path, dtype=dtype, attn_implementation="eager", local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:
            raise self.refusal(f"transformers cannot load it ({_first_line(error)})") from error
        module, report = made
        for what in ("missing", "unexpected", "mismatched"):  # transformers goes on with random numbers
            if names := report.get(f"{what}_keys"):
                raise self.refusal(
                    f"its tensors do not fit its config, {what}: {list_names(map(str, names))}"
                )
        return FallbackModel(self, module.to(device), dtype)


class FallbackModel:
    """A module of transformers over our KV pool; the same interface as `Decoder`.

    Attributes:
        config: what is known of the model.
        module: the module of transformers.
        dtype, device, nbytes: of its weights.
    """

    def __init__(self, source: FallbackSource, module: Any, dtype: torch.dtype) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(_NAME, foreign_attention)
        self.config, self.module, self.dtype = source.config, module, dtype
        self.device: torch.device = module.device
        self.nbytes = sum(weight.nbytes for weight in module.parameters())  # a tied one comes once
        self._source = source
        try:
            expected = [self._eagerly(tokens) for tokens in self._trials()]
            module.set_attn_implementation(_NAME)
            self._num_kv_heads, self._head_dim = self._shapes()
            got = self._paged(self._trials())
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            raise source.refusal(
                f"its module does not run with our attention ({_first_line(error)})"
            ) from error
        self._compare(got, expected)

    @property
    def layer_groups(self) -> LayerGroups:
        """One group that keeps every block: modules of transformers do not tell their windows before a step."""
        return LayerGroups.one(self.config.num_layers)

    def new_kv(self, num_blocks: int, block_size: int, groups: LayerGroups | None = None) -> KVStorage:
        """A KV pool for this model."""
        return KVStorage(
            num_layers=self.config.num_layers, groups=groups, num_blocks=num_blocks, block_size=block_size,
            num_kv_heads=self._num_kv_heads, head_dim=self._head_dim, dtype=self.dtype, device=self.device,
        )  # fmt: skip

    def forward(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's T tokens, writing their keys and values, and return logits [S, vocab_size]."""
        return self._run(ForeignStep(inputs, kv), inputs.logits_indices)

    def hidden(self, inputs: ModelInputs, kv: KVStorage) -> torch.Tensor:
        """Compute the step's T tokens, and their logits [T, vocab_size]: modules keep no common state before them."""
        return self._run(ForeignStep(inputs, kv), torch.arange(len(inputs.token_ids), device=self.device))

    def logits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Some rows of what `hidden` gave."""
        return x.index_select(0, rows)

    def _run(self, step: ForeignStep, rows: torch.Tensor) -> torch.Tensor:
        inputs, token = step.inputs, STEP.set(step)
        try:
            with torch.inference_mode():
                logits: torch.Tensor = self.module(
                    input_ids=inputs.token_ids[None],
                    position_ids=inputs.positions[None],
                    use_cache=False,
                    logits_to_keep=rows,
                ).logits[0]
        finally:
            STEP.reset(token)
        if step.complaint:
            raise self._source.refusal(step.complaint)
        # Not every module knows `logits_to_keep`.
        return logits if len(logits) == len(rows) else logits.index_select(0, rows)

    # -- the trial ----------------------------------------------------------------------------------------------

    def _trials(self) -> list[list[int]]:
        """Two short texts, one longer than a small window."""
        window = getattr(self.module.config.get_text_config(), "sliding_window", None) or 0
        length = window + 3 if window <= 64 else 9
        return [[(7 * place + shift) % self.config.vocab_size for place in range(count)]
                for shift, count in ((1, max(length, 9)), (3, 5))]  # fmt: skip

    def _eagerly(self, tokens: list[int]) -> torch.Tensor:
        """Their own logits."""
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=self.device)
            logits: torch.Tensor = self.module(input_ids=ids, use_cache=False).logits[0]
            return logits

    def _shapes(self) -> tuple[int, int]:
        """KV heads and their size, the same in all layers."""
        step = ForeignStep(_inputs([([1, 2, 3], 0, 3, [0])], self.device), None)
        self._run(step, step.inputs.logits_indices)
        if sorted(step.shapes) != list(range(self.config.num_layers)):
            raise self._source.refusal(
                f"{len(step.shapes)} of its {self.config.num_layers} layers attend by the interface"
            )
        kinds = getattr(self.module.config.get_text_config(), "layer_types", None) or ()
        if "sliding_attention" in kinds and not step.windows:
            raise self._source.refusal("its layers do not tell the attention interface their window")
        if len(set(step.shapes.values())) > 1:
            raise self._source.refusal("its layers have unlike heads")
        return step.shapes[0]

    def _paged(self, trials: list[list[int]]) -> list[torch.Tensor]:
        """Their logits with our attention: in chunks, side by side, over scattered blocks."""
        long, short = trials
        blocks = -(-len(long) // 4)
        kv = self.new_kv(blocks + 3, 4)
        kv.poison()
        tables = [list(range(blocks, 0, -1)), [blocks + 2, 0]]
        first = self.forward(_inputs([(long, 0, 4, tables[0]), (short, 0, 5, tables[1])], self.device), kv)
        rest = self.forward(_inputs([(long, 4, len(long) - 1, tables[0])], self.device), kv)
        last = self.forward(_inputs([(long, len(long) - 1, len(long), tables[0])], self.device), kv)
        return [torch.cat((first[:4], rest, last)), first[4:]]

    def _compare(self, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        share = 1e-3 if self.dtype == torch.float32 else 5e-2
        for ours, theirs in zip(got, expected, strict=True):
            largest = theirs.float().abs().max()
            differs = (ours.float() - theirs.float()).abs().max()
            if not differs <= share * largest:
                raise self._source.refusal(
                    f"with our attention its logits differ by {differs:.2g}, where the largest is {largest:.2g}"
                )


def _inputs(shares: list[tuple[list[int], int, int, list[int]]], device: torch.device) -> ModelInputs:
    """A step of blocks of 4 that computes tokens start to end of each (tokens, start, end, block table)."""
    ids = [token for tokens, start, end, _ in shares for token in tokens[start:end]]
    places = [(place, table) for _, start, end, table in shares for place in range(start, end)]
    lens = [end - start for _, start, end, _ in shares]
    width = max(len(table) for *_, table in shares)
    starts = [sum(lens[:count]) for count in range(len(lens) + 1)]

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return ModelInputs(
        token_ids=ints(ids),
        positions=ints([place for place, _ in places]),
        slot_mapping=ints([table[place // 4] * 4 + place % 4 for place, table in places]),
        query_start=ints(starts),
        context_lens=ints([end for _, _, end, _ in shares]),
        block_tables=ints([table + [-1] * (width - len(table)) for *_, table in shares]),
        logits_indices=ints(range(len(ids))),
        query_lens=lens,
        ends=[end for _, _, end, _ in shares],
        num_single=int(lens == [1]),
    )


def _first_line(error: Exception) -> str:
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])
