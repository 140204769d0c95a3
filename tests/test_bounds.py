"""No value of any field, no file of a run and no request ends in a traceback, a hang or silence: it is refused, or it runs.

The same in thousands of cases: `make chaos` (benchmarks/bounds.py).
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from odd_inputs import CASES, answer
from odd_runs import REQUEST_CASES, RUN_CASES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "number"), [(CASES, 75), (RUN_CASES, 60), (REQUEST_CASES, 60)], ids=["fields", "runs", "requests"]
)
def test_odd_values_are_refused_in_one_line_or_run(cases, number):
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
