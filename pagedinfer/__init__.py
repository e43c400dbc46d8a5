"""pagedinfer: see inside an LLM inference engine, live, in Jupyter.

Importing this package loads the standard library only. What needs torch or ipywidgets loads on first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedinfer.config import BeamSearchParams, EngineConfig, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from pagedinfer.engine.engine import Engine
    from pagedinfer.engine.options import Retain
    from pagedinfer.engine.output import CompletionOutput, RequestOutput
    from pagedinfer.engine.policy import Policy
    from pagedinfer.llm import LLM
    from pagedinfer.session import Session
    from pagedinfer.sim.compare import compare
    from pagedinfer.sim.fork import fork
    from pagedinfer.sim.why import why
    from pagedinfer.trace.recorder import Recorder
    from pagedinfer.trace.recording import Recording

__version__ = "0.1.0"

# torch's CPU threads (GNU OpenMP) spin while they wait for each other. Where anything else runs beside them, that made
# a decode step of SmolLM2 four to eight times slower; asleep they cost little. It is here because it takes effect only
# before torch is loaded; a value that is set already stays.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_LAZY = {
    "LLM": "pagedinfer.llm",
    "Engine": "pagedinfer.engine.engine",
    "CompletionOutput": "pagedinfer.engine.output",
    "RequestOutput": "pagedinfer.engine.output",
    "Policy": "pagedinfer.engine.policy",
    "Retain": "pagedinfer.engine.options",
    "Recorder": "pagedinfer.trace.recorder",
    "Recording": "pagedinfer.trace.recording",
    "Session": "pagedinfer.session",
    "compare": "pagedinfer.sim.compare",
    "fork": "pagedinfer.sim.fork",
    "why": "pagedinfer.sim.why",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Policy",
    "Recorder",
    "Recording",
    "RequestOutput",
    "Retain",
    "SamplingParams",
    "Session",
    "StructuredOutputsParams",
    "__version__",
    "compare",
    "fork",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pagedinfer' has no attribute {name!r}")
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pagedinfer"):
            raise
        message = f'pagedinfer.{name} needs {error.name}: pip install "pagedinfer[engine]"'
        raise ModuleNotFoundError(message, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)
