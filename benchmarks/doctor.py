"""Breaks small runs on purpose, and sees whether `samestep doctor` names what was done to them, and leaves sound ones alone.

    make bench NAME=doctor

`doctored/cases.py` lists the runs: 20 broken and 20 sound to fit the rules by, as many to check them, of other recipes,
settings and seeds. What each left is kept in `doctored/`, so that the judgement alone is made anew; --train makes the runs anew.

A broken run is named if one of the findings is of a kind that its line lists. A sound run is accused if there is any finding.
The cost of --watch_layers is the CPU seconds in its methods over those of the whole steps, at one measurement in ten steps.
"""

import json
import os
from pathlib import Path
from typing import Any

from doctored.cases import CHECK, FIT, read_cases
from harness import ROOT, flags, open_work_folder

KEPT = Path(__file__).parent / "doctored"
GROUPS = {"fit": FIT, "check": CHECK}


def train_all(group: str, names: list[str] | None, work: Path) -> None:
    """Train the runs of a group, one after the other, and keep what they left."""
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    from common import load_script
    from doctored.child import train
    from doctored.data import write_labels, write_texts

    if not (work / "texts.jsonl").exists():
        write_texts(work)
        write_labels(work)
    file = KEPT / f"{group}.json"
    cases = read_cases(GROUPS[group])
    kept = {run["name"]: run for run in json.loads(file.read_text())["runs"]} if file.exists() else {}
    scripts: dict[str, Any] = {}
    for case in cases:
        if names and case.name not in names:
            continue
        if case.script not in scripts:
            scripts[case.script] = load_script(case.script)
        run = train(case, scripts[case.script], work)
        if run is None:
            continue
        kept[case.name] = run
        losses = run["steps"]["loss"]
        print(case.name, run["code"], len(losses), losses[:1], losses[-1:], flush=True)
        rows = [json.dumps(kept[case.name]) for case in cases if case.name in kept]
        file.write_text('{"runs": [\n' + ",\n".join(rows) + "\n]}\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    parser = flags("doctor", __doc__, work=True)
    parser.add_argument("--train", nargs="*", metavar="NAME", help="make these runs anew, or all")
    parser.add_argument("--group", choices=list(GROUPS), help="make those of one group anew")
    chosen = parser.parse_args(argv)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "OMP_NUM_THREADS": "1"}
    if chosen.train is not None:
        with open_work_folder(chosen.work) as work:
            for group in [chosen.group] if chosen.group else GROUPS:
                train_all(group, chosen.train, work)


if __name__ == "__main__":
    main()
