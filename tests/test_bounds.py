"""No value of any field ends in a traceback, a hang or silence: it is refused in one line, or it runs.

The same in thousands of cases: `make chaos` (benchmarks/bounds.py).
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from odd_inputs import CASES, answer

NUM_CASES = 75


@pytest.mark.slow
def test_odd_values_of_every_field_are_refused_in_one_line_or_run():
    @settings(
        max_examples=NUM_CASES,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def check_case(case):
        result = answer(case)
        assert not result.problem, f"{result.problem}: {case}\n{result.errors[-3000:]}"

    check_case()
