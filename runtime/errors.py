"""Errors that a user can act on, each with the exit code of the command line's contract."""

from __future__ import annotations

from typing import ClassVar


class DevplanError(Exception):
    """What went wrong, why, and how to mend it; the command prints it on one line, without a traceback.

    Args:
        what: the failed thing, lower case, names in backticks, no final period.
        why: the cause, as far as it is known.
        hint: what the user can do about it.
    """

    code: ClassVar[int] = 1
    kind: ClassVar[str] = "failure"

    def __init__(self, what: str, *, why: str = "", hint: str = "") -> None:
        super().__init__(f"{what}: {why}" if why else what)
        self.what, self.why, self.hint = what, why, hint

    def line(self) -> str:
        """The contract's single line: ``error: WHAT (code N): WHY; HOW TO MEND IT``."""
        tail = "; ".join(part for part in (self.why, self.hint) if part)
        head = f"error: {self.what} (code {self.code})"
        return _printable(" ".join((f"{head}: {tail}" if tail else head).split()))


def _printable(text: str) -> str:
    """Control characters of names and of other people's messages as escapes: none may reach a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )


class UsageError(DevplanError):
    """A flag, a configuration or a model file does not follow the contract."""

    code, kind = 2, "usage"


class UnsupportedOperatorError(DevplanError):
    """The model cannot be exported; the message names the operator and the user's line."""

    code, kind = 3, "unsupported"


class PassError(DevplanError):
    """A pass failed on this model, or left a program that its verifier refuses."""

    code, kind = 1, "pass"


class PlanError(DevplanError):
    """A plan breaks an invariant: an overlap, a wrong device, an undeclared alias."""

    code, kind = 1, "plan"


class MismatchError(DevplanError):
    """Results or artifacts differ."""

    code, kind = 4, "mismatch"


class BudgetError(DevplanError):
    """A budget (memory, copies, file size) is exceeded."""

    code, kind = 5, "budget"


class DeviceError(DevplanError):
    """There is no device, or the artifact has no code for it."""

    code, kind = 6, "device"


class ArtifactError(DevplanError):
    """The file is damaged, truncated, of another version, or not an artifact."""

    code, kind = 7, "artifact"


class ExecutionError(DevplanError):
    """A driver or library call failed while running."""

    code, kind = 1, "execution"


class ScatteredCopyError(ExecutionError):
    """A strided copy would take more memory copies than it is worth."""


EXPORT_PACKAGES = ("torch", "triton")
"""What an installation that only runs programs lacks; the extra ``export`` brings it."""


def not_installed(package: str, what: str) -> DevplanError:
    """The error where one of `EXPORT_PACKAGES` is missing, with the command that brings it."""
    return DevplanError(what, why=f"{package} is not installed", hint='pip install "devplan[export]"')
