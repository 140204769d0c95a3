"""Reads training programs without running them, and points at lines that make the step depend on its cut. Needs no torch."""
