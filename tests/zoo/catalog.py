"""What is in the zoo: our model files, torchvision families, and samples by name order of timm and transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from devplan.passes.source.model import ModelSource

MODELS = Path(__file__).parents[2] / "configs" / "models"
TIMM_COUNT, TRANSFORMERS_COUNT = 60, 40
FURTHER_COUNT = 12
"""How many a sampled group has in its second sample, drawn from what the first one left."""
FURTHER = "_further"
"""The end of the name of a second sample."""


def names(group: str) -> list[str]:
    """The names of a group, in order."""
    if group == "models":
        return sorted(path.stem for path in MODELS.glob("*.py") if path.stem != "__init__")
    if group == "torchvision":
        from .torchvision_models import families as of_torchvision

        return of_torchvision()
    if group.removesuffix(FURTHER) in _SAMPLED:
        return _sampled(group)
    groups = [name + end for name in _SAMPLED for end in ("", FURTHER)]
    raise SystemExit(f"unknown group `{group}`; groups are models, torchvision, {', '.join(groups)}")


def _sampled(group: str) -> list[str]:
    """The first sample of a group, or the second, of what is not in the first."""
    listed, count = _SAMPLED[group.removesuffix(FURTHER)]
    ordered = listed()
    first = sample(ordered, count)
    if not group.endswith(FURTHER):
        return first
    return sample([name for name in ordered if name not in set(first)], FURTHER_COUNT)


def _timm() -> list[str]:
    from .timm_models import families

    return families()


def _transformers() -> list[str]:
    from .transformers_models import architectures

    return architectures()


_SAMPLED: dict[str, tuple[Callable[[], list[str]], int]] = {
    "timm": (_timm, TIMM_COUNT),
    "transformers": (_transformers, TRANSFORMERS_COUNT),
}


def sample(ordered: Sequence[str], count: int) -> list[str]:
    """``count`` of the names, evenly by their order."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[index * len(ordered) // count] for index in range(count)]


def build(group: str, name: str) -> ModelSource:
    """One model."""
    if group == "models":
        from devplan.passes.source.load import resolve

        return resolve(str(MODELS / f"{name}.py"))
    if group == "torchvision":
        from .torchvision_models import build as build_torchvision

        return build_torchvision(name)
    if group.removesuffix(FURTHER) == "timm":
        from .timm_models import build as build_timm

        return build_timm(name)
    from .transformers_models import build as build_transformers

    return build_transformers(name)
