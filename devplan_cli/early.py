"""What `run` begins before the command itself is imported: parsing words takes longer than it should.

`typer` and what it imports take 0.1 s and more, in which a GPU can start.
"""

from __future__ import annotations

from collections.abc import Sequence


def begin_gpu(words: Sequence[str]) -> None:
    """Start the driver for a `run` that may need it, and the context where the words name a GPU.

    Words that are wrong are not told here; nothing is begun for them that the command would not begin.
    """
    if words[:1] != ["run"] or not {"-h", "--help"}.isdisjoint(words):
        return
    kind, _, number = _device(words).partition(":")
    if kind not in ("", "cuda"):
        return
    from ..runtime.cuda import warm

    warm.begin_driver()
    is_mapped = any(word.startswith("--device-map") for word in words)
    if kind and not is_mapped and (number or "0").isdigit():
        warm.begin_context(int(number or 0))


def _device(words: Sequence[str]) -> str:
    """What `--device` names, or nothing."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--device":
            return following
        if word.startswith("--device="):
            return word.partition("=")[2]
    return ""
