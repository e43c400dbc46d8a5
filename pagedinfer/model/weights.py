"""Weights that arrive lazily: a source yields name -> (shape, storage type, read), one tensor at a time.

All sources speak the names of `model/layout.py`, Hugging Face's for a Llama, with the rows of the query and key
projections in the order of those files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import printable
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.layout import EMBEDDING, OUTPUT, expected_shapes

if TYPE_CHECKING:
    import torch

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "CheckpointFile",
    "WeightInfo",
    "WeightSource",
    "check_weights",
    "expected_shapes",
    "list_names",
    "needs_engine",
    "open_weights",
]

_SHOWN = 10  # names in one error message


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """What is known of a tensor without reading it."""

    name: str
    shape: tuple[int, ...]
    storage: str
    """How the file holds it: "BF16", "F32", "Q4_1", ..."""


@runtime_checkable
class WeightSource(Protocol):
    """A checkpoint, open for reading."""

    config: ModelConfig

    def names(self) -> tuple[str, ...]:
        """Names of all tensors; `lm_head.weight` is absent when the output is tied to the embedding."""
        ...

    def info(self, name: str) -> WeightInfo:
        """Shape and storage type of one tensor, without reading it."""
        ...

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, decoded to `dtype`: dense, contiguous, on the CPU, owning its memory."""
        ...

    def close(self) -> None:
        """Close the files. Harmless when called twice."""
        ...


class CheckpointFile:
    """What the sources on disk share: a config, a table of tensors, and errors that name the path.

    Args:
        path: the file or folder.
        config: what it says about itself.
        infos: one entry per tensor.

    """

    def __init__(self, path: Path, config: ModelConfig, infos: Iterable[WeightInfo]) -> None:
        self.path = path
        self.config = config
        self._infos = {info.name: info for info in infos}

    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of the file."""
        return tuple(self._infos)

    def info(self, name: str) -> WeightInfo:
        """Shape and storage type of one tensor.

        Raises:
            ModelError: there is no tensor of this name.

        """
        found = self._infos.get(name)
        if found is None:
            raise ModelError(f'"{self.path}" has no tensor "{name}"; it has {list_names(self._infos)}')
        return found

    def drop(self, name: str) -> None:
        """Forget a tensor that means nothing to the model, so that `names()` is what a loader must read."""
        del self._infos[name]

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, decoded to `dtype`."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files. Harmless when called twice."""


def open_weights(path: Path) -> WeightSource:
    """Open a checkpoint: a folder with `config.json` and safetensors, or a `.gguf` file.

    Raises:
        ModelError: the path is neither, or the checkpoint is damaged or not supported.

    """
    path = Path(path)
    needs_engine("torch", "numpy", "gguf")
    try:
        source = _open(path)
        try:
            _drop_harmless(source)
        except BaseException:
            source.close()
            raise
    except OSError as error:
        raise ModelError(f'"{path}" cannot be read ({error})') from error
    return source


def _open(path: Path) -> CheckpointFile:
    if path.is_dir():
        from pagedinfer.model.folder import FolderWeights

        return FolderWeights(path)
    if path.suffix.lower() == ".gguf" and path.is_file():
        from pagedinfer.model.gguf import GgufWeights

        return GgufWeights(path)
    what = "is neither" if path.exists() else "does not exist"
    raise ModelError(
        f'"{path}" {what}; a model is a folder with config.json and safetensors, or a .gguf file'
    )


def needs_engine(*packages: str) -> None:
    """Raise one sentence when a package that models need is not installed.

    Raises:
        ModelError: it is missing.

    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f'{package} is missing; models need the "engine" extra: pip install "pagedinfer[engine]"'
            )


def check_weights(source: WeightSource) -> None:
    """Compare a source with its config, without reading tensors.

    Raises:
        ModelError: tensors are missing, unexpected or misshapen; the message names them.

    """
    expected = expected_shapes(source.config)
    names = source.names()
    present = set(names)
    missing = [name for name in expected if name not in present]
    unexpected = [name for name in names if name not in expected]
    misshapen = [
        f"{printable(name)} is {list(source.info(name).shape)} instead of {list(expected[name])}"
        for name in names
        if name in expected and source.info(name).shape != expected[name]
    ]
    problems = [
        f"{len(found)} {what}: {list_names(found)}"
        for what, found in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        if found
    ]
    if problems:
        raise ModelError(
            f'the tensors of "{source.config.name}" do not fit its config. {"; ".join(problems)}. '
            "Use a complete checkpoint, without adapters or extra heads"
        )


def _drop_harmless(source: CheckpointFile) -> None:
    """Drop the extras that are known to change nothing, or only the config, after looking that it is so."""
    import torch

    for name in source.names():
        if name.endswith(".rotary_emb.inv_freq"):
            source.drop(name)  # a buffer that old checkpoints saved; the decoder computes it from rope_theta
        elif name == "rope_freqs.weight":
            source.config = _with_divisors(source, name)
            source.drop(name)
        elif name == OUTPUT and source.config.tie_word_embeddings:
            same = source.info(OUTPUT).shape == source.info(EMBEDDING).shape
            if not same or not torch.equal(
                source.read(OUTPUT, torch.float32), source.read(EMBEDDING, torch.float32)
            ):
                raise ModelError(
                    f'"{source.path}" says tie_word_embeddings, but its {OUTPUT} differs from {EMBEDDING}; '
                    "set tie_word_embeddings to false in config.json if the output is a matrix of its own"
                )
            source.drop(name)


def _with_divisors(source: CheckpointFile, name: str) -> ModelConfig:
    """Read a GGUF's divisors of rotary angles: so llama.cpp writes the scaling of Llama 3."""
    import torch

    config, rotary = source.config, source.config.blueprint.rotary
    divisors = source.read(name, torch.float32) if len(source.info(name).shape) == 1 else torch.zeros(0)
    usable = len(divisors) == config.head_dim // 2 and bool(
        (divisors > 0).all() and divisors.isfinite().all()
    )
    if rotary is None or rotary.scaling != "none" or not usable:
        raise ModelError(
            f'"{source.path}" divides its rotary angles by {name}, which must be a positive number for each of '
            f"{config.head_dim // 2} pairs in a model that does not scale them otherwise"
        )
    if bool((divisors == 1).all()):
        return config
    divided = replace(rotary, scaling="divided", factors=tuple(divisors.tolist()))
    return replace(config, blueprint=replace(config.blueprint, rotary=divided))


def list_names(names: Iterable[str]) -> str:
    """Join the first ten names."""
    names = list(names)
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(printable, names[:_SHOWN])) + rest
