"""The models that tasks train."""

from samestep._internals import library_output as library_output
from samestep._internals.late_imports import BITSANDBYTES, load_when_used

load_when_used(BITSANDBYTES)
