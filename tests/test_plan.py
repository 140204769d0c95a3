"""Effective batch arithmetic, with the source documents' worked examples."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.cut.layout import shares, solve_layout
from samestep.errors import UsageError

# b, k, N, B
WORKED = [
    (8, 4, 1, 32),  # BERT-Large on one RTX 3090
    (4, 32, 1, 128),  # BERT-Large on one RTX 2080 Ti
    (4, 16, 8, 512),  # GPT-2 1.5B on 8 A100
    (2, 64, 8, 1024),  # GPT-3 style on 8 A100
    (8, 64, 4, 2048),
    (64, 1, 4, 256),  # ResNet-50 on 4 T4
    (32, 4, 4, 512),
    (256, 1, 1, 256),  # ResNet-50 on one V100
    (1024, 1, 3, 3072),  # captcha CNN on 3 A100
    (512, 2, 3, 3072),
    (512, 1, 3, 1536),
    (64, 1, 4, 256),  # BERT-Base on 4 V100
]


@pytest.mark.parametrize(("b", "k", "n", "batch"), WORKED)
def test_two_of_b_k_and_the_batch_give_the_third(b, k, n, batch):
    pairs = [
        {"per_device_train_batch_size": b, "gradient_accumulation_steps": k},
        {"global_batch_size": batch, "per_device_train_batch_size": b},
        {"global_batch_size": batch, "gradient_accumulation_steps": k},
        {"global_batch_size": batch, "per_device_train_batch_size": b, "gradient_accumulation_steps": k},
    ]
    layouts = {solve_layout(num_processes=n, **two) for two in pairs}
    assert len(layouts) == 1
    layout = layouts.pop()
    assert (layout.global_batch_size, layout.per_device_train_batch_size) == (batch, b)
    assert layout.gradient_accumulation_steps == k


def test_the_captcha_fallback_of_896_is_uneven():
    layout = solve_layout(num_processes=3, global_batch_size=3072, per_device_train_batch_size=896)
    assert (layout.shares, layout.gradient_accumulation_steps) == ((1024, 1024, 1024), 2)


@given(batch=st.integers(1, 5000), n=st.integers(1, 64), b=st.integers(1, 300))
def test_any_batch_on_any_layout(batch, n, b):
    layout = solve_layout(num_processes=n, global_batch_size=batch, per_device_train_batch_size=b)
    assert sum(layout.shares) == batch
    assert max(layout.shares) - min(layout.shares) <= 1
    assert (layout.gradient_accumulation_steps - 1) * b < max(layout.shares) <= layout.gradient_accumulation_steps * b


def test_batches_that_nothing_divides():
    assert shares(10, 3) == (4, 3, 3)
    assert shares(2, 3) == (1, 1, 0)
    assert "3 to 4 samples" in str(solve_layout(num_processes=3, global_batch_size=10))


def test_a_contradiction_shows_the_arithmetic():
    with pytest.raises(
        UsageError, match=r"4 micro-batches of at most 8 are needed \(1 x 8 x 3 = 24\).*--global_batch_size 24"
    ):
        solve_layout(
            num_processes=1, global_batch_size=32, per_device_train_batch_size=8, gradient_accumulation_steps=3
        )


def test_all_bad_values_at_once():
    with pytest.raises(UsageError) as error:
        solve_layout(num_processes=0, global_batch_size=0, per_device_train_batch_size=-1)
    assert len(error.value.problems) == 3
    with pytest.raises(UsageError, match="give two of"):
        solve_layout(num_processes=2, per_device_train_batch_size=8)


@pytest.mark.parametrize("size", [2.5, 8.0, "8", math.nan, math.inf, True, [8], {"b": 8}, np.array([8, 8])])
@pytest.mark.parametrize("name", ["num_processes", "global_batch_size", "per_device_train_batch_size"])
def test_a_size_is_a_whole_number(name, size):
    """As of somebody who computes it: 512 / 64 is 8.0."""
    sizes = {"num_processes": 2, "global_batch_size": 32, "per_device_train_batch_size": 8}
    with pytest.raises(UsageError) as error:
        solve_layout(**sizes | {name: size})
    assert str(error.value) == f"{name} is {size!r}, must be a whole number, 1 or more"


def test_sizes_of_numpy_are_whole_numbers():
    sizes = {"num_processes": 2, "global_batch_size": 32, "per_device_train_batch_size": 8}
    assert solve_layout(**{name: np.int64(size) for name, size in sizes.items()}) == solve_layout(**sizes)


def test_processes_are_as_many_as_lists_hold():
    with pytest.raises(UsageError, match="num_processes is 1000000000000, must be 131,072 or less"):
        solve_layout(num_processes=10**12, global_batch_size=32)
    with pytest.raises(UsageError, match="num_processes is None, must be a whole number"):
        solve_layout(num_processes=None, global_batch_size=32)


@pytest.mark.parametrize(
    "module",
    [
        "samestep.cut.order",
        "samestep.recipe.run_settings",
        "samestep.errors",
        "stepplan.cli.plan_model",
        "stepplan.growth",
        "stepplan.page",
    ],
)
def test_planning_imports_no_torch(module):
    """Nor jinja2 before there is a page to write."""
    heavy = {"torch", "transformers", "datasets", "jinja2"}
    program = f"import {module}, sys; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_plan_imports_no_torch():
    """Not even one that is refused, and looks for other hardware."""
    program = (
        "import sys; from samestep import cli, errors; sys.argv = ['recipes', 'plan', 'gpt2_xl_8xa100', '--on', '1x3090']\n"
        "assert errors.exit_code(cli.main) == 2 and not {'torch', 'transformers', 'jinja2'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
