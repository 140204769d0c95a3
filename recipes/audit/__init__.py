"""Does a training loop take the step that it says it takes? `audit_step` for models and loops, `audit-script` for programs."""

from recipes.audit.causes import CAUSES, Finding
from recipes.audit.judge import Comparison
from recipes.audit.step import Audit, Cut, assert_same_step, audit_step, default_cuts

__all__ = ["CAUSES", "Audit", "Comparison", "Cut", "Finding", "assert_same_step", "audit_step", "default_cuts"]
