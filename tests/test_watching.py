"""What a run tells those who watch it: the progress bar, its early end, its pictures, its trackers, its model card."""

import contextlib
import io
import json
import types
from importlib.metadata import version
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from common import metrics, model_of
from huggingface_hub import RepoUrl
from rooms import read_card
from transformers import AutoTokenizer, pipeline

from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.training import progress

SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


def test_the_bar_starts_after_the_headers_and_does_not_count_evaluations(train, monkeypatch, after_forward):
    times, printed = [0.0], io.StringIO()
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: sum(times)))

    def pass_time(model, *_, **__):
        times.append(1.0 if model.training else 100.0)

    after_forward(model_of("pretrain_bert"), pass_time)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        output_dir = train("run", SMALL + " --eval_steps 5")
    headers, _, end = printed.getvalue().partition("Training: ")
    assert "steps 0 to 10 of 10" in headers
    assert end.startswith("10/10")
    assert [line["seconds"] for line in metrics(output_dir)] == [2.0] * 10, "of two micro-batches, without evaluations"


def test_the_rate_of_the_bar_leaves_out_what_is_between_steps():
    bar = progress.Progress(
        load("bert_small_cpu"), types.SimpleNamespace(num_steps=10, spans=None), torch.device("cpu")
    )
    with contextlib.redirect_stderr(io.StringIO()):
        bar.start(0, is_shown=True)
        start = bar.bar.start_t
        bar.clock -= 100.0  # as long ago is the last step
        bar.restart_clock()
        bar.close()
    assert bar.bar.start_t - start >= 100.0


@pytest.mark.parametrize(
    ("flags", "steps", "why"),
    [
        ("--stop_after_step 4", "4 of 10", "stop_after_step is 4"),
        ("--max_train_minutes 1e-6", "1 of 10", "max_train_minutes is 1e-06"),
        ("--max_train_minutes 100", None, None),
    ],
)
def test_an_early_end_is_said_with_how_to_go_on(train, capsys, flags, steps, why):
    output_dir = train("run", f"{SMALL} {flags}")
    lines = [line for line in capsys.readouterr().out.splitlines() if "--resume_from_checkpoint latest" in line]
    assert len(lines) == (steps is not None)
    if lines:
        assert all(text in lines[0] for text in (f"step {steps}", why, str(output_dir)))
        assert ("without --stop_after_step" in lines[0]) == ("stop" in flags)


@pytest.mark.parametrize(
    ("program", "task", "text", "options"),
    [
        ("finetune_classifier", "text-classification", "a wonderful film " * 200, {"truncation": True}),
        ("pretrain_bert", "fill-mask", "the [MASK] is " + "a value " * 200, {"tokenizer_kwargs": {"truncation": True}}),
        (
            "pretrain_gpt2",
            "text-generation",
            "the value is " * 200,
            {"handle_long_generation": "hole", "max_new_tokens": 9},
        ),
    ],
)
def test_the_saved_tokenizer_knows_the_length_that_the_model_was_trained_at(train, program, task, text, options):
    length = "--block_size 24" if program == "pretrain_gpt2" else "--max_seq_length 24"
    output_dir = train("run", f"{SMALL} {length} --max_train_steps 1", program=program)
    assert AutoTokenizer.from_pretrained(output_dir).model_max_length == 24
    assert pipeline(task, model=str(output_dir))(text, **options)


def split_card(output_dir) -> tuple[dict, str]:
    _, front, text = read_card(output_dir).split("---\n", 2)
    return yaml.safe_load(front), text


def test_the_card_describes_the_users_data_and_training(train, corpus):
    flags = f"{SMALL} --train_file {corpus} --license mit --max_position_embeddings 64"
    output_dir = train("mine", flags)
    front, text = split_card(output_dir)
    results = json.loads((output_dir / "all_results.json").read_text())
    assert (front["license"], front["pipeline_tag"], front["library_name"]) == ("mit", "fill-mask", "transformers")
    assert "base_model" not in front
    assert "datasets" not in front
    assert "Python's own documentation" not in text
    assert results["data"] == corpus.name
    assert results["samples_seen"] == 80
    assert results["tokens_seen"] == sum(line["tokens"] for line in metrics(output_dir))
    recipe = yaml.safe_load((output_dir / "recipe.yaml").read_text())
    assert corpus.name in recipe["description"]
    assert recipe["source"].startswith("bert_small_cpu, but for vocab_size")
    assert "measured (" not in recipe["expect"]
    for fact in (
        *(
            "# mine\n",
            corpus.name,
            "80 samples",
            "1 x CPU",
            "files in float32; trained in float32",
            f"torch: {version('torch')}",
            "datasets: ",
        ),
        *(
            "up to 64, are untrained",
            "total_train_batch_size: 8",
            "gradient_accumulation_steps: 2",
            "adamw with betas=(",
        ),
        *('BertForPreTraining.from_pretrained(".")', recipe["source"], "| 0 | "),
    ):
        assert fact in text


def test_the_card_says_which_steps_its_hardware_did(train):
    flags = f"{SMALL} --max_train_steps 4"
    train("mine", f"{flags} --stop_after_step 2")
    output_dir = train("mine", f"{flags} --resume_from_checkpoint latest")
    (line,) = [line for line in read_card(output_dir).splitlines() if "**Hardware**" in line]
    assert line.endswith("), from step 3 on; others did the steps before")
    assert not read_card(train("whole", flags)).count("others did the steps before")


def test_what_is_pushed_is_loaded_from_its_repository(train, monkeypatch):
    uploads = []

    class Hub:
        def create_repo(self, name, exist_ok):
            return RepoUrl(f"https://huggingface.co/me/{name}")

        def upload_folder(self, *, repo_id, folder_path, ignore_patterns):
            uploads.append((repo_id, (folder_path / "README.md").read_text()))
            return "https://huggingface.co/commit"

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match="push_to_hub is true, but nobody is logged in to the hub"):
        train("never", f"{SMALL} --push_to_hub", program="pretrain_gpt2")
    monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
    flags = f"{SMALL} --max_train_steps 1"
    folder = train("a_model", flags, program="pretrain_gpt2")
    measured = json.loads((folder / "all_results.json").read_text())
    train("a_model", f"{flags} --resume_from_checkpoint latest --push_to_hub", program="pretrain_gpt2")
    again = json.loads((folder / "all_results.json").read_text())
    assert [again[name] for name in ("train_seconds", "tokens_per_second")] == [
        measured[name] for name in ("train_seconds", "tokens_per_second")
    ]
    ((repo_id, text),) = uploads
    assert repo_id == "me/a_model"
    assert '.from_pretrained("me/a_model")' in text
    assert "# a_model\n" in text
    assert "8 samples" in text, "what the finished run has seen"
    Hub.upload_folder = lambda *_, **__: 1 / 0
    with pytest.raises(
        UsageError, match=r"push_to_hub failed \(division by zero\). All results are in .*hf upload a_model"
    ):
        train("a_model", f"{flags} --resume_from_checkpoint latest --push_to_hub", program="pretrain_gpt2")


def test_a_published_dataset_and_model_are_named_to_the_hub(monkeypatch):
    from samestep.contrib.publishing import card

    recipe = load("finetune_glue_bert_base", {"dataset_config_name": "mrpc"})
    settings, folder = run_settings.RunSettings(recipe=""), Path("run")
    run = types.SimpleNamespace(recipe=recipe, settings=settings, accelerator=None, output_dir=folder)
    front = card.Training(run).metadata("transformers")
    assert (front.base_model, front.datasets) == (recipe.model_name_or_path, [recipe.dataset_name])
    assert front.pipeline_tag == "text-classification"
    assert "license" not in front.to_dict()
    assert recipe.data_name.endswith("mrpc")


def test_losses_are_drawn_apart_with_a_centred_mean_and_the_first_evaluation(real_figures):
    steps = [{"step": n, "loss": 3.0 * n, "mlm_loss": 2.0 * n, "nsp_loss": 1.0 * n} for n in range(1, 151)]
    evaluations = [
        {"step": n, "eval_loss": 9.0 - n, "eval_mlm_loss": 5.0, "eval_nsp_loss": 4.0, "eval_nsp_accuracy": n / 9}
        for n in (0, 9)
    ]
    from samestep.contrib.publishing import charts

    figure = charts.draw_training(steps, evaluations, ["mlm", "nsp"], "a title")
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert figure.get_suptitle() == "a title"
    assert [axes.get_ylabel() for axes in panels] == ["loss", "mlm_loss", "nsp_loss", "of held-out data"]
    _, mean, points = panels[0].lines
    assert mean.get_xdata().tolist() == list(range(2, 150))
    assert mean.get_ydata() == pytest.approx(3 * mean.get_xdata()), "the mean of a line lies on it"
    assert points.get_xdata().tolist() == [0, 9]
    assert [text.get_text().split(":")[1].split()[0] for text in panels[0].get_legend().texts] == ["447", "0"]
    assert [line.get_ydata().tolist() for line in panels[3].lines] == [[0, 1]]


def test_a_loss_that_is_another_is_drawn_once_and_nothing_is_a_picture_too(real_figures):
    steps = [{"step": n, "loss": 1.0, "character_loss": 1.0, "string_loss": None} for n in (1, 2)]
    from samestep.contrib.publishing import charts

    figures = [charts.draw_training(steps, [], ["character", "string"], ""), charts.draw_training([], [], ["lm"], "")]
    assert [axes.get_ylabel() for axes in figures[0].axes if axes.get_visible()] == ["loss", "string_loss"]
    assert len(figures[1].axes) == 1
