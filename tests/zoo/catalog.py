"""What is in the zoo: our model files, torchvision families, and samples by name order of timm and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from devplan.passes.source.model import ModelSource

MODELS = Path(__file__).parents[2] / "configs" / "models"
TIMM_COUNT, SECOND_COUNT, TRANSFORMERS_COUNT = 60, 40, 40
FURTHER_COUNT = 12
"""How many a sampled group has in its second sample, drawn from what the first one left."""
FURTHER = "_further"
"""The end of the name of a second sample."""
OFFSET = "+"
"""In ``transformers+8``: each place of the first sample, and eight names behind it."""


def names(group: str) -> list[str]:
    """The names of a group, in order."""
    if group == "models":
        return sorted(path.stem for path in MODELS.glob("*.py") if path.stem != "__init__")
    if group == "torchvision":
        from .torchvision_models import families as of_torchvision

        return of_torchvision()
    if _kind(group) in _SAMPLED:
        return _sampled(group)
    groups = [name + end for name in _SAMPLED for end in ("", FURTHER)]
    raise SystemExit(f"unknown group `{group}`; groups are models, torchvision, {', '.join(groups)}")


def _kind(group: str) -> str:
    """The group without the words that say which of its samples is meant."""
    return group.partition(OFFSET)[0].removesuffix(FURTHER)


def _sampled(group: str) -> list[str]:
    """The first sample of a group, the one behind it by an offset, or the second, of what is not in the first."""
    listed, count = _SAMPLED[_kind(group)]
    ordered = listed()
    offset = group.partition(OFFSET)[2]
    if offset:
        return sample(ordered, count, int(offset))
    first = sample(ordered, count)
    if not group.endswith(FURTHER):
        return first
    return sample([name for name in ordered if name not in set(first)], FURTHER_COUNT)


def _timm() -> list[str]:
    from .timm_models import families

    return families()


def _timm_second() -> list[str]:
    from .timm_models import families

    return families(place=1)


def _transformers() -> list[str]:
    from .transformers_models import architectures

    return architectures()


_SAMPLED: dict[str, tuple[Callable[[], list[str]], int]] = {
    "timm": (_timm, TIMM_COUNT),
    "timm_second": (_timm_second, SECOND_COUNT),
    "transformers": (_transformers, TRANSFORMERS_COUNT),
}


def sample(ordered: Sequence[str], count: int, offset: int = 0) -> list[str]:
    """``count`` of the names, evenly by their order, each ``offset`` names later."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[(index * len(ordered) // count + offset) % len(ordered)] for index in range(count)]


def build(group: str, name: str) -> ModelSource:
    """One model."""
    if group == "models":
        from devplan.passes.source.load import resolve

        return resolve(str(MODELS / f"{name}.py"))
    if group == "torchvision":
        from .torchvision_models import build as build_torchvision

        return build_torchvision(name)
    if _kind(group) in ("timm", "timm_second"):
        from .timm_models import build as build_timm

        return build_timm(name, place=int(_kind(group) == "timm_second"))
    from .transformers_models import build as build_transformers

    return build_transformers(name)
