"""Golden texts: run pytest with --update-goldens to accept a change, then read the diff."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/golden")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports torch or triton where they are not installed, as `importorskip` does."""
    report = yield
    missing = re.search(r"No module named '(torch|triton)\b", str(report.longrepr))
    if report.outcome == "failed" and missing and not _is_installed(missing[1]):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {missing[1]} is not installed")
    return report


def _is_installed(name: str) -> bool:
    try:
        import_module(name)
    except ModuleNotFoundError:
        return False
    return True


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
