"""Every known fault of engines of this kind is a test by its id here (`test_bm_10_...`), or has a reason why not.

The list restates public bug reports of other engines; the ids are those of our list. A test that stands for a fault
carries its id in its name, in whatever file it belongs to.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FAULTS = {
    "BM": (2, 4, 6, 8, 10, 12, 14, 16),
    "SC": (2, 4, 6, 8, 10, 12, 14, 16, 18),
    "SD": (2, 4, 6, 8, 10, 12, 14, 16, 18),
    "QL": (2, 4, 6, 8, 10, 12, 14),
    "OF": (2, 4, 6, 8),
    "TR": (2, 4, 6, 8),
    "NB": (2, 4, 6, 8, 10, 12),
    "SV": (2, 4, 6),
}
"""Area -> numbers: block manager, scheduler, sampling and text, loading and quantization, offload, Triton kernels,
notebooks, server."""

NOT_YET = {
    "QL-02": "nothing is quantized by us yet; packed files are decoded when they are read",
    "QL-04": "nothing is quantized by us yet",
    "QL-14": "keys and values are not quantized yet",
    "OF-08": "nothing is offloaded yet",
    "TR-02": "there are no Triton kernels yet",
    "TR-06": "there are no Triton kernels yet; torch indexes with 64 bits",
    "TR-08": "there are no Triton kernels yet",
    "SV-06": "there is no server yet",
}
"""The part that could have the fault does not exist. The reason goes when the part comes."""

IDS = [f"{area}-{number:02d}" for area, numbers in FAULTS.items() for number in numbers]


@functools.cache
def named_tests():
    found = {}
    for path in sorted(TESTS.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (
                match := re.match(r"test_([a-z]{2})_(\d\d)_", node.name)
            ):
                found.setdefault(f"{match[1].upper()}-{match[2]}", []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("fault", IDS)
def test_each_fault_has_a_test_or_a_reason(fault):
    has_test, has_reason = fault in named_tests(), fault in NOT_YET
    name = f"test_{fault.lower().replace('-', '_')}_..."
    assert has_test or has_reason, f"{fault} has neither a test named {name} nor a reason"
    assert not (has_test and has_reason), f"{fault} has a test now: drop its reason"


def test_no_test_names_an_unknown_fault():
    assert set(named_tests()) <= set(IDS)


def test_the_list_is_the_one_we_share():
    page = TESTS.parent.parent / "shared" / "known-faults.md"
    if not page.exists():
        pytest.skip("the page of known faults lies beside the development checkout only")
    assert re.findall(r"^### ([A-Z]{2}-\d\d) ", page.read_text(encoding="utf-8"), re.MULTILINE) == IDS
