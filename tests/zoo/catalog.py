"""What is in the zoo: our model files, torchvision families, and samples by name order of timm and transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from devplan.passes.source import ModelSource

MODELS = Path(__file__).parents[2] / "configs" / "models"
TIMM_COUNT, TRANSFORMERS_COUNT = 60, 40


def names(group: str) -> list[str]:
    """The names of a group, in order."""
    if group == "models":
        return sorted(path.stem for path in MODELS.glob("*.py") if path.stem != "__init__")
    if group == "torchvision":
        from .torchvision_models import families as of_torchvision

        return of_torchvision()
    if group == "timm":
        from .timm_models import families

        return sample(families(), TIMM_COUNT)
    if group == "transformers":
        from .transformers_models import architectures

        return sample(architectures(), TRANSFORMERS_COUNT)
    raise SystemExit(f"unknown group `{group}`; groups are models, torchvision, timm and transformers")


def sample(ordered: Sequence[str], count: int) -> list[str]:
    """``count`` of the names, evenly by their order."""
    if len(ordered) <= count:
        return list(ordered)
    return [ordered[index * len(ordered) // count] for index in range(count)]


def build(group: str, name: str) -> ModelSource:
    """One model."""
    if group == "models":
        from devplan.passes.load_source import resolve

        return resolve(str(MODELS / f"{name}.py"))
    if group == "torchvision":
        from .torchvision_models import build as build_torchvision

        return build_torchvision(name)
    if group == "timm":
        from .timm_models import build as build_timm

        return build_timm(name)
    from .transformers_models import build as build_transformers

    return build_transformers(name)
