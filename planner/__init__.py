"""Plan memory for a program. Pure Python and NumPy, without torch."""

from .check import check
from .options import Effort, PlanOptions
from .plan import plan

__all__ = ["Effort", "PlanOptions", "check", "plan"]
