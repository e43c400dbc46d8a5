"""The solved copies run with the slow suites; `tests/test_notebooks.py` runs the solutions without a kernel."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cells of solved notebooks as slow."""
    for item in items:
        if item.path.parent.name == "solutions":
            item.add_marker(pytest.mark.slow)
