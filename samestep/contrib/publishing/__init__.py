"""Pages about a finished run: its chart, its model card, their upload to the hub."""
