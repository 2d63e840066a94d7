"""Options whose value may be left out: ``--skip-h2d`` alone means all, before the parser sees them."""

from __future__ import annotations

from collections.abc import Sequence

OPTIONAL_VALUE = ("--skip-h2d", "--skip-d2h")
ALL = "*"


def fill_optional_values(argv: Sequence[str]) -> list[str]:
    """Write every option of `OPTIONAL_VALUE` as ``--option=value``.

    The next word is its value when it is ``METHOD`` or ``METHOD.TENSOR``; another option, a file or
    ``package.module:NAME`` is not, and then the value is ``*``.
    """
    words: list[str] = []
    index = 0
    while index < len(argv):
        word = argv[index]
        if word in OPTIONAL_VALUE:
            following = argv[index + 1] if index + 1 < len(argv) else ""
            index += 1 if (taken := _is_target(following)) else 0
            word = f"{word}={following if taken else ALL}"
        words.append(word)
        index += 1
    return words


def _is_target(word: str) -> bool:
    is_source = word.endswith((".py", ".pt2", ".pte")) or any(mark in word for mark in "/\\:")
    return bool(word) and not word.startswith("-") and not is_source
