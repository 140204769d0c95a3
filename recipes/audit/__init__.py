"""Does a training loop take the step that it says it takes? `audit_step` for models and loops, `audit-script` for programs."""

from recipes.audit.judge import CAUSES, Comparison, Finding
from recipes.audit.step import Audit, Cut, assert_same_step, audit_step, default_cuts

__all__ = ["CAUSES", "Audit", "Comparison", "Cut", "Finding", "assert_same_step", "audit_step", "default_cuts"]
