"""What pytest does not import: programs that train, and what tests/test_reproductions.py runs."""

collect_ignore = ["reproductions", "upstream"]
