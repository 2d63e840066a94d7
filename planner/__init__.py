"""Plan memory for a program. Pure Python and NumPy, without torch."""

from .check import check
from .options import Effort, PlanOptions
from .plan import plan
from .report import PeakEntry, peak_report

__all__ = ["Effort", "PeakEntry", "PlanOptions", "check", "peak_report", "plan"]
