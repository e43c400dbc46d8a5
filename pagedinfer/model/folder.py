"""Model folders as Hugging Face writes them: `config.json` and safetensors, in one file or in shards."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import ModelError
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.weights import EMBEDDING, CheckpointFile, WeightInfo, list_names

if TYPE_CHECKING:
    import torch

__all__ = ["FolderWeights", "read_json", "safetensors_files"]


class FolderWeights(CheckpointFile):
    """A folder as Hugging Face writes it: `config.json`, and `model.safetensors` or its shards with an index.

    Raises:
        ModelError: a file is missing or damaged, or the config asks for what the decoder does not compute.

    """

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
        self._files: dict[str, Path] = {}
        infos = []
        for file in safetensors_files(path):
            for info in _safetensors_infos(file):
                self._files[info.name] = file
                infos.append(info)
        parsed = ModelConfig.from_hf(config, generation, name=_folder_name(path, config))
        super().__init__(path, parsed, infos)
        if not (config.get("dtype") or config.get("torch_dtype")) and EMBEDDING in self._infos:
            stored = {"BF16": "bfloat16", "F16": "float16"}.get(self.info(EMBEDDING).storage, "float32")
            self.config = replace(parsed, dtype=stored)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, converted to `dtype`. Only its own bytes are read.

        Raises:
            ModelError: no such tensor, or it is not stored as plain floating point.

        """
        import torch
        from safetensors import safe_open

        info = self.info(name)
        if info.storage not in ("F64", "F32", "F16", "BF16"):
            raise ModelError(
                f'the tensor "{name}" in "{self._files[name]}" is stored as {info.storage}; '
                "supported in safetensors: F32, F16, BF16, F64"
            )
        # The tensor is a window on the mapped file: copy it, and unmap at once so that pages don't pile up.
        with safe_open(self._files[name], framework="pt") as file:
            window: torch.Tensor = file.get_tensor(name)
            return window.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def safetensors_files(path: Path) -> list[Path]:
    """List the safetensors files of a folder; an index is checked against what is there."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelError(
            f'"{path}" has neither model.safetensors nor model.safetensors.index.json; '
            "other formats (pytorch_model.bin, ...) are not read"
        )
    weight_map = read_json(index).get("weight_map") or {}
    files = sorted({path / file for file in weight_map.values()})
    absent = [file.name for file in files if not file.exists()]
    if absent or not files:
        raise ModelError(
            f'"{index}" names {len(files)} files, of which are missing: {list_names(absent) or "all"}'
        )
    return files


def _safetensors_infos(file: Path) -> list[WeightInfo]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as tensors:
            windows = [(name, tensors.get_slice(name)) for name in tensors.keys()]  # noqa: SIM118
            return [
                WeightInfo(name, tuple(item.get_shape()), str(item.get_dtype())) for name, item in windows
            ]
    except SafetensorError as error:
        raise ModelError(f'"{file}" is damaged or incomplete ({error}); download it again') from error


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelError: there is no such file, or it holds something else.

    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f'"{file.parent}" has no {file.name}; a model folder needs one') from error
    except ValueError as error:
        raise ModelError(f'"{file}" is not valid JSON ({error})') from error
    if not isinstance(value, dict):
        raise ModelError(f'"{file}" holds a {type(value).__name__}; it must be a JSON object')
    return value


def _folder_name(path: Path, config: Mapping[str, Any]) -> str:
    """Name a model after its folder; in the Hugging Face cache that is `models--org--name/snapshots/hash`."""
    cached = re.search(r"models--(.+?)[/\\]snapshots[/\\]", path.as_posix() + "/")
    return cached[1].replace("--", "/") if cached else str(config.get("_name_or_path") or path.resolve().name)
