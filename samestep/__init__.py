"""One recipe, the same optimizer step on any hardware."""

__version__ = "0.1.0"
