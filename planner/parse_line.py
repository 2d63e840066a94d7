"""The tokens of one line of a program's textual form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from ..runtime.dtypes import DType
from ..runtime.errors import UsageError
from ..runtime.expr import Expr, Size
from ..runtime.program import Argument, Device, Ref

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:\\.|[^"\\])*")
  | (?P<expr>`[^`]*`)
  | (?P<device>\#?(?:cpu|cuda:\d+)(?![\w.:]))
  | (?P<number>-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf(?![\w.:]))|nan(?![\w.:]))
  | (?P<word>[A-Za-z_]\w*(?:(?:::|\.)\w+)*)
  | (?P<sign>->|[%@$!(){}\[\],=:+])
    )""",
    re.ASCII | re.VERBOSE,
)
_T = TypeVar("_T")


class Line:
    """The tokens of one line, taken from the left."""

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number
        self.tokens: list[tuple[str, str]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise self.error(f"cannot read `{text[at:].strip()}`")
            self.tokens.append((match.lastgroup, match.group(match.lastgroup)))
            at = match.end()
        self.at = 0

    def error(self, why: str) -> UsageError:
        """The error of this line."""
        return UsageError(f"line {self.number} of the program's text", why=f"{why} in `{self.text.strip()}`")

    @property
    def is_done(self) -> bool:
        """Whether all tokens are taken."""
        return self.at >= len(self.tokens)

    @property
    def peek(self) -> str:
        """The next token; empty at the end."""
        return "" if self.is_done else self.tokens[self.at][1]

    def take(self, kind: str = "") -> str:
        """The next token, which must be of this kind if one is named."""
        if self.is_done or (kind and self.tokens[self.at][0] != kind):
            raise self.error(f"expected {kind or 'more'}, found `{self.peek or 'the end'}`")
        self.at += 1
        return self.tokens[self.at - 1][1]

    def skip(self, text: str) -> bool:
        """Take the token if it is this one (a string never is)."""
        if self.peek == text and self.tokens[self.at][0] != "string":
            self.at += 1
            return True
        return False

    def expect(self, *texts: str) -> None:
        """Take exactly these tokens."""
        for text in texts:
            if not self.skip(text):
                raise self.error(f"expected `{text}`, found `{self.peek or 'the end'}`")

    def integer(self) -> int:
        """A whole number."""
        return int(self.take("number"))

    def string(self) -> str:
        """A text in quotes."""
        return str(json.loads(self.take("string")))

    def name(self, sigil: str = "") -> str:
        """A name behind its sigil, in quotes where it is no word."""
        if sigil:
            self.expect(sigil)
        return self.string() if self.peek.startswith('"') else self.take("word")

    def device(self) -> Device:
        """``cuda:0``."""
        return Device.parse(self.take("device").lstrip("#"))

    def dtype(self) -> DType:
        """``float32``."""
        word = self.take("word")
        try:
            return DType.from_name(word)
        except KeyError:
            raise self.error(f"unknown type `{word}`") from None

    def size(self) -> Size:
        """A number, or an expression between backquotes."""
        if self.peek.startswith("`"):
            return Expr(self.take("expr")[1:-1])
        return self.integer()

    def items(self, opening: str, closing: str, item: Callable[[], _T]) -> tuple[_T, ...]:
        """``( a, b )``: zero or more items between brackets, commas between them."""
        self.expect(opening)
        found: list[_T] = []
        while not self.skip(closing):
            if found:
                self.expect(",")
                if self.skip(closing):
                    break
            found.append(item())
        return tuple(found)

    def argument(self) -> Argument:
        """A value, size, type, device, text, number or tuple of these."""
        kind, token = self.tokens[self.at] if not self.is_done else ("", "")
        if token == "%":
            return Ref(self.name("%"))
        if token == "(":
            return self.items("(", ")", self.argument)
        if self.skip("!"):
            return self.dtype()
        if kind == "device":
            return self.device()
        if kind == "string":
            return self.string()
        if kind == "expr":
            return self.size()
        if kind == "number":
            text = self.take()
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        words: dict[str, Argument] = {"None": None, "True": True, "False": False}
        if token not in words:
            raise self.error(f"expected an argument, found `{token or 'the end'}`")
        self.take()
        return words[token]
