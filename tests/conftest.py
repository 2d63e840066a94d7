"""Golden texts: run pytest with --update-goldens to accept a change, then read the diff."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a text with tests/golden/NAME."""

    def check(text: str, name: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--update-goldens"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.is_file(), f"no golden {name}; run pytest --update-goldens"
        assert text == path.read_text(), (
            f"golden {name} differs; run pytest --update-goldens and read the diff"
        )

    return check
