"""From a model's name to a model in memory, with its tokenizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from pagedinfer.backends.torch_ops import TorchOps
from pagedinfer.errors import ConfigError, UnknownArchitecture
from pagedinfer.model.decoder import Decoder
from pagedinfer.model.fallback import FallbackSource
from pagedinfer.model.protocols import CausalModel, ModelInfo
from pagedinfer.model.tiny import ByteTokenizer, TinyWeights
from pagedinfer.model.weights import WeightSource
from pagedinfer.runner.torch_runner import pick_dtype

__all__ = ["LoadedModel", "check_device", "load_model"]


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: the decoder, or transformers' own modules behind the same interface.
        tokenizer: text to ids and back.
        config: what the checkpoint says of itself.
        max_model_len: the most tokens of a request that it was loaded for.
        modules: "pagedinfer", or "transformers" for an architecture that only transformers knows.
    """

    model: CausalModel
    tokenizer: Any
    config: ModelInfo
    max_model_len: int
    modules: str

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an output, from all of the model's files."""
        return tuple(sorted({*self.tokenizer.eos_token_ids, *self.config.eos_token_ids}))


def load_model(name: str, *, dtype: str, device: str, max_model_len: int | None) -> LoadedModel:
    """Find (and fetch, where needed) a model and read its weights, one tensor after the other.

    Raises:
        ModelError: it cannot be found, fetched or used.
        ConfigError: `dtype` is unknown, or `max_model_len` is more than the model takes.
    """
    source, tokenizer = _open(name)
    try:
        config = source.config
        if max_model_len is None:
            max_model_len = config.usual_max_len
        elif max_model_len > config.max_position_embeddings:
            limit = config.max_position_embeddings
            raise ConfigError(f"max_model_len={max_model_len}: {config.name} takes at most {limit} tokens.")
        torch_dtype = pick_dtype(dtype, config, device)
        if isinstance(source, FallbackSource):
            logging.getLogger("pagedinfer").warning(
                "%s: the architecture %s is computed by transformers' own modules over our KV blocks; slower than %s.",
                config.name, config.architecture, "the families that pagedinfer computes itself",
            )  # fmt: skip
            model: CausalModel = source.load(torch_dtype, device)
            return LoadedModel(model, tokenizer, config, max_model_len, "transformers")
        decoder = Decoder(source.config, TorchOps(), dtype=torch_dtype, device=device, max_len=max_model_len)
        return LoadedModel(decoder.load(source), tokenizer, config, max_model_len, "pagedinfer")
    finally:
        source.close()


def _open(name: str) -> tuple[WeightSource | FallbackSource, Any]:
    if name == "tiny":
        return TinyWeights(), ByteTokenizer()
    from pagedinfer.model.sources import resolve
    from pagedinfer.model.tokenizer import open_tokenizer
    from pagedinfer.model.weights import open_weights

    path = resolve(name)
    tokenizer = open_tokenizer(path)
    try:
        return open_weights(path), tokenizer
    except UnknownArchitecture:
        if not path.is_dir():
            raise
    return FallbackSource(path), tokenizer


def check_device(device: str) -> None:
    """Refuse a device that torch cannot use here, before anything is loaded.

    Raises:
        ConfigError: with torch's reason.
    """
    try:
        torch.empty(0, device=torch.device(device))
    except (AssertionError, RuntimeError, TypeError) as error:  # all three come from torch, by kind of device
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={device!r} cannot be used here ({reason}); use 'cpu'.") from error
