"""What each task trains."""

from samestep._internals import library_output as library_output
