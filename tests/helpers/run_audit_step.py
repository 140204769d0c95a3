"""Steps that `stepaudit.processes` takes in several processes, forked: imports are waited for once."""

import sys

from stepaudit import processes


def main(folder: str, subject_folder: str) -> None:
    """Take the steps of the subject in a folder, and end the process; `folder` has its output."""
    sys.argv = ["", subject_folder]
    processes.work()
