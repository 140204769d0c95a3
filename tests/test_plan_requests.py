"""Plans of requests that were made of the planner: what they are called, what they are refused for, and with which words."""

import json
import re

import pytest

from samestep import cli
from samestep.errors import exit_code


def run(capsys, *words):
    cli.main(list(words))
    return capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("words", "title", "wrong"),
    [
        (
            "llama3_8b_sft_8xa100 --model_name_or_path meta-llama/Meta-Llama-3-70B",
            "Meta-Llama-3-70B on allenai/tulu-3-sft-mixture (llama3_8b_sft_8xa100)",
            "Llama 3.1 8B, all",
        ),
        ("gpt2_124m --train_file mine.txt", "gpt2_124m on mine.txt", "OpenWebText"),
        (
            "gpt_modern_730m_8xh100 --hidden_size 2048 --num_attention_heads 16 --num_train_tokens 30e9",
            "gpt_modern_730m_8xh100 of another shape",
            "757M",
        ),
        ("gpt_modern_730m_8xh100 --num_train_tokens 30e9", "gpt_modern_730m_8xh100", "6 billion tokens"),
    ],
)
def test_a_plan_is_named_after_what_it_plans(capsys, words, title, wrong):
    text = " ".join(run(capsys, "plan", *words.split(), "--on", "64xh100").split())
    assert text.startswith(f"{title} on 64xh100: ")
    assert f"Details {title}: " in text
    assert wrong not in text


def test_a_job_is_named_after_what_it_trains(capsys):
    words = "llama3_8b_sft_8xa100 --model_name_or_path meta-llama/Meta-Llama-3-70B --on slurm:8x8xh100"
    job = run(capsys, "launch", *words.split(), "--", "--output_dir", "/s")
    assert "--job-name=meta-llama-3-70b-on-" in job
    assert len(re.search("--job-name=(.*)", job)[1]) <= 50
