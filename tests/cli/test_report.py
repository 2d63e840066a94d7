"""The report's drawings, and the page in a real browser where there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.devplan_cli.report.treemap import Box, squarify, tree

from .conftest import Made, devplan

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=40))
def test_a_treemap_fills_its_box_with_areas_in_proportion(sizes: list[int]) -> None:
    sizes.sort(reverse=True)
    boxes = squarify(sizes, Box(0, 0, 300, 200))
    scale = 300 * 200 / sum(sizes)
    for nbytes, box in zip(sizes, boxes, strict=True):
        assert box.width * box.height == pytest.approx(nbytes * scale, rel=1e-6)
        assert box.x >= -1e-6 and box.y >= -1e-6
        assert box.x + box.width <= 300 + 1e-6 and box.y + box.height <= 200 + 1e-6
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert wide <= 1e-6 or high <= 1e-6


def test_the_tree_of_constants_adds_up() -> None:
    root = tree([("a.b.weight", 3), ("a.c", 4), ("d", 5)])
    assert (root.nbytes, root.children["a"].nbytes, root.children["a"].children["b"].nbytes) == (12, 7, 3)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_a_browser_shows_the_page_and_runs_its_script(tiny: Made, tmp_path: Path) -> None:
    page = tmp_path / "tiny.html"
    assert devplan("inspect", tiny.path, "--report", page).code == 0
    assert BROWSER is not None
    base = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = tmp_path / "tiny.png"
    subprocess.run(
        [*base, f"--screenshot={shot}", "--window-size=1100,1600", page.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert shot.stat().st_size > 20_000
    dom = subprocess.run(
        [*base, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert '<div id="tip-box">' in dom.stdout, "the script did not run"
    assert dom.stdout.count("<rect") == page.read_text().count("<rect")
