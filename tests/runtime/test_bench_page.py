"""The page of a measurement: every call is in the picture, and nothing in it is taken for markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devplan.runtime.measure.bench_page import bins, histogram, page
from devplan.runtime.measure.timing import Percentiles

TIMES = [200.0 + i % 17 for i in range(500)] + [900.0]


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=400))
def test_every_call_falls_into_one_bin(values: list[float]) -> None:
    start, width, counts = bins(values)
    assert sum(counts) == len(values)
    assert start == min(values) and width > 0


def test_outliers_do_not_flatten_the_picture() -> None:
    start, width, counts = bins(TIMES)
    assert start + width * len(counts) < 250
    assert counts[-1] >= 1


def document(**changes: object) -> dict[str, object]:
    numbers = Percentiles.of([t * 1e-6 for t in TIMES]).document()
    return {
        "method": "forward", "device": "NVIDIA H200", "cuda_graph": True,
        "latency_us": {"end_to_end": numbers, "h2d": None, "device": numbers, "d2h": None},
        "cold_start_s": {"import": 0.1, "load": 0.5, "first_result": 0.7},
        "memory": {"arena": 5177344, "constants": 21276672, "state": 0, "graph": None, "measured_total": None},
    } | changes  # fmt: skip


def test_the_page_says_what_the_document_says() -> None:
    text = page(document(), TIMES)
    for wanted in ("forward on NVIDIA H200", "501 calls", "one CUDA graph", "5,177,344", "0.700", "<svg"):
        assert wanted in text
    assert "h2d" not in text  # what was not measured is not shown


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b', "x & y"])
def test_names_are_text_and_never_markup(name: str) -> None:
    found: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found.append(tag)

    Tags().feed(page(document(method=name, cuda_graph={"reason": name}), TIMES))
    assert "script" not in found


def test_the_picture_is_told_in_words_too() -> None:
    label = re.search('aria-label="([^"]*)"', histogram(TIMES, {"p50": 208.0}))
    assert label is not None and label[1] == "Histogram of 501 latencies in microseconds: p50 208.0"
