"""No value of any field, no file or program of others, no file of a run and no request ends in a traceback, a hang or silence.

The same in thousands of cases: `make chaos` (benchmarks/bounds.py).
"""

import pytest
from cases import thorough
from hypothesis import HealthCheck, Phase, given, settings
from odd_inputs import BOUNDED, CASES, PLACES, READERS, _case, answer
from odd_runs import REQUEST_CASES, RUN_CASES

NUMBERS = {"fields": (CASES, 10), "others": (BOUNDED, 10), "runs": (RUN_CASES, 10), "requests": (REQUEST_CASES, 8)}
ACCEPTED = ("capacity", "verified images")
"""Readers of caches, which are made anew where they are damaged."""


@pytest.mark.slow
@pytest.mark.parametrize(("cases", "number"), NUMBERS.values(), ids=NUMBERS)
def test_odd_inputs_are_refused_in_one_line_or_run(cases, number):
    @settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def check_case(case):
        result = answer(case)
        assert not result.problem, f"{result.problem}: {case}\n{result.errors[-3000:]}"

    check_case()


# One reader of each kind of data is tried in every place; the others of its kind bound what they read by the same function.
ENDLESS_ALWAYS = ("documents .jsonl", "texts .csv", "rows .parquet")
CASES_WITHOUT_END = [
    thorough(place, reader)
    if place != "pipe" and reader.startswith(("documents", "texts", "rows")) and reader not in ENDLESS_ALWAYS
    else (place, reader)
    for place in ("zeros", "pipe", "endless")
    for reader in sorted(READERS)
]


@pytest.mark.parametrize(("place", "reader"), CASES_WITHOUT_END)
def test_what_has_no_end_is_refused_wherever_a_file_is_read(reader, place):
    assert place in PLACES
    result = answer(_case("file that is none", reader, place))
    assert not result.problem, f"{result.problem}\n{result.errors[-3000:]}"
    assert result.code == (0 if reader in ACCEPTED else 2)
