"""The memory report: one self-contained page without network, and a plot for documents."""

from __future__ import annotations

from .page import write_page

__all__ = ["write_page"]
