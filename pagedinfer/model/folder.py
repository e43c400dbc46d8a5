"""Model folders as Hugging Face writes them: `config.json` and safetensors, in one file or in shards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedinfer.errors import ModelError
from pagedinfer.model.checked import printable, read_json, shown
from pagedinfer.model.config import ModelConfig
from pagedinfer.model.layout import Place, find_places
from pagedinfer.model.safetensors import StoredTensor, read_tensor, tensors_of
from pagedinfer.model.weights import EMBEDDING, CheckpointFile, WeightInfo, list_names

if TYPE_CHECKING:
    import torch

__all__ = ["FolderWeights", "folder_name", "safetensors_files"]

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_. -]{,200}")  # no way out of the folder


class FolderWeights(CheckpointFile):
    """A folder as Hugging Face writes it: `config.json`, and `model.safetensors` or its shards with an index.

    Raises:
        ModelError: a file is missing or damaged, or the config asks for what the decoder does not compute.

    """

    def __init__(self, path: Path) -> None:
        config = read_json(path / "config.json")
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else None
        self._stored = _all_tensors(path)
        parsed = ModelConfig.from_hf(config, generation, name=folder_name(path, config))
        self._places = _one_place_each(
            path, find_places(parsed, {k: v.shape for k, v in self._stored.items()})
        )
        self._last: tuple[str, torch.dtype, torch.Tensor] | None = None
        infos = [
            WeightInfo(name, place.shape, self._stored[place.stored].storage)
            for name, place in self._places.items()
        ]
        super().__init__(path, parsed, infos)
        if not (config.get("dtype") or config.get("torch_dtype")) and EMBEDDING in self._infos:
            stored = {"BF16": "bfloat16", "F16": "float16"}.get(self.info(EMBEDDING).storage, "float32")
            self.config = replace(parsed, dtype=stored)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, converted to `dtype`. Only its own bytes are read; of a fused one it is cut out, and the
        whole is kept for its other parts until something else is read.

        Raises:
            ModelError: no such tensor, or it is not stored as plain floating point.

        """
        import torch

        self.info(name)
        place = self._places[name]
        stored = self._stored[place.stored]
        if place.expert is None and place.first_row is None:
            self._last = None
            whole = read_tensor(stored, dtype)
            return whole.T.contiguous() if place.transposed else whole
        if self._last is None or self._last[:2] != (place.stored, dtype):
            self._last = None
            self._last = (place.stored, dtype, read_tensor(stored, dtype))
        part = self._last[2]
        part = part if place.expert is None else part[place.expert]
        part = part.T if place.transposed else part
        first = place.first_row or 0
        return part[first : first + place.shape[0]].clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Let go of the tensor that is kept for its other parts. Harmless when called twice."""
        self._last = None


def _one_place_each(path: Path, places: dict[str, list[Place]]) -> dict[str, Place]:
    for name, found in places.items():
        if len(found) > 1:
            twice = list_names(place.stored for place in found)
            raise ModelError(f'"{path}" holds {printable(name)} twice, in {twice}')
    return {name: found[0] for name, found in places.items()}


def _all_tensors(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors of all files, each in one of them only, and in the one that an index names."""
    found: dict[str, StoredTensor] = {}
    for file, promised in safetensors_files(path).items():
        tensors = {tensor.name: tensor for tensor in tensors_of(file)}
        twice = [name for name in tensors if name in found]
        if twice:
            first = found[twice[0]].file.name
            raise ModelError(f'"{path}" holds {list_names(twice)} twice, in {first} and in {file.name}')
        absent = [name for name in promised if name not in tensors]
        if absent:
            raise ModelError(f'"{file}" lacks {list_names(absent)}, which the index says it has')
        found |= tensors
    return found


def safetensors_files(path: Path) -> dict[Path, list[str]]:
    """List the safetensors files of a folder, each with the tensors that an index promises in it.

    Raises:
        ModelError: there are none, or the index names files that are missing or outside the folder.

    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        return {single: []}
    if not index.exists():
        raise ModelError(
            f'"{path}" has neither model.safetensors nor model.safetensors.index.json; '
            "other formats (pytorch_model.bin, ...) are not read"
        )
    weight_map = read_json(index).get("weight_map") or {}
    if not isinstance(weight_map, dict):
        raise ModelError(f'weight_map in "{index}" is {shown(weight_map)}; it must be an object')
    files: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ModelError(
                f'"{index}" puts {shown(name)} into {shown(file)}; it must name a file beside it'
            )
        files.setdefault(file, []).append(name)
    absent = [file for file in files if not (path / file).exists()]
    if absent or not files:
        raise ModelError(
            f'"{index}" names {len(files)} files, of which are missing: {list_names(absent) or "all"}'
        )
    return {path / file: files[file] for file in sorted(files)}


def folder_name(path: Path, config: Mapping[str, Any]) -> str:
    """Name a model after its folder; in the Hugging Face cache that is `models--org--name/snapshots/hash`."""
    cached = re.search(r"models--(.+?)[/\\]snapshots[/\\]", path.as_posix() + "/")
    return cached[1].replace("--", "/") if cached else str(config.get("_name_or_path") or path.resolve().name)
