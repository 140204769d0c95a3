"""`samestep chat`: what a fine-tuning left answers in the terminal, or one line says why it does not."""

import io
import json
import sys
from pathlib import Path

import pytest
import transformers
from cases import keep
from chat_bases import make_tokenizer, save_base, write_chats
from transformers import AutoModelForCausalLM

from samestep.contrib.chat import INTERRUPTED, chat
from samestep.errors import UsageError
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning

NO_SHAPE = " ".join(f"--{name} none" for name in ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE))
NO_DRAWN = " ".join(f"--{name} none" for name in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
TRAINED = (
    "--max_train_steps 100 --global_batch_size 8 --max_seq_length 128 --num_generations 0 --validation_fraction 0.2 "
    "--lr_scheduler_type constant"
)
WAYS = {
    "whole": "--max_train_steps 100 --learning_rate 1e-2",
    "adapter": "--max_train_steps 160 --learning_rate 3e-2 --lora_rank 16 --lora_alpha 32",
    "merged": "--max_train_steps 160 --learning_rate 3e-2 --lora_rank 16 --lora_alpha 32 --merge_adapter --max_merge_loss 1",
}


@pytest.fixture(scope="module")
def results(scripts, tmp_path_factory):
    """Folders of the results, each of a base that was trained on the same chats."""
    from common import fresh_accelerator, tiny_argv

    folder = tmp_path_factory.mktemp("results")
    base, chats = save_base(folder / "base"), write_chats(folder / "chats.jsonl")
    for way, flags in WAYS.items():
        data = f"{NO_DRAWN} --train_file {chats} {NO_SHAPE} --model_name_or_path {base}"
        fresh_accelerator()
        argv = tiny_argv("finetune_causal_lm", chats, folder / way, f"{TRAINED} {data} {flags}")
        scripts["finetune_causal_lm"].main(argv)
    return folder


@pytest.fixture
def ask(capsys, monkeypatch):
    """ask("folder", "line", ..., flags="...") -> exit code, and the lines that were answered."""

    def run(folder, *lines: str, flags: tuple = ()) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        code = chat([str(folder), *flags])
        out, run.err = capsys.readouterr()
        return code, out.splitlines()

    return run


PLACES = ["whole", "adapter", "merged", "merged/adapter", "whole/checkpoint-100", "adapter/checkpoint-160"]


@pytest.mark.parametrize("place", keep(PLACES, ["whole", "merged/adapter", "adapter/checkpoint-160"]))
def test_every_result_answers_and_stops(results, ask, place, recwarn):
    assert ask(results / place, flags=("--once", "Say 2.")) == (0, ["cc"])
    assert [each for each in recwarn if issubclass(each.category, FutureWarning)] == []  # a user cannot mend them


def test_it_knows_what_was_said_before(results, ask, after_forward):
    prompts = []

    def note(model, outputs, input_ids, **_):
        if input_ids.shape[1] > 1:  # the first of an answer
            prompts.append(make_tokenizer().decode(input_ids[0]))

    after_forward(transformers.LlamaForCausalLM, note)
    code, lines = ask(results / "whole", "Say 1.", "", "Say 3.", flags=("--system", "Answer."))
    assert (code, len(lines)) == (0, 2)
    said = [
        f"{role}\n{text}<|im_end|>\n"
        for role, text in (("user", "Say 1."), ("assistant", lines[0]), ("user", "Say 3."))
    ]
    assert "<|im_start|>".join(["", *said]) in prompts[1]


def test_the_prompt_is_the_one_that_was_trained(results, ask, monkeypatch):
    """With the system's turn, if one is given, and the sampling that is asked for."""
    calls = []

    def generate(self, tokens, **options):
        calls.append((tokens[0].tolist(), options))

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", generate)
    flags = ("--once", "Say 2.", "--system", "Be kind.", "--temperature", "0.5", "--max_new_tokens", "7")
    assert ask(results / "whole", flags=flags)[0] == 0
    ask(results / "whole", flags=("--once", "Say 2.", "--temperature", "0"))
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay 2.<|im_end|>\n<|im_start|>assistant\n"
    (tokens, options), (_, greedy) = calls
    assert make_tokenizer().decode(tokens) == text
    assert (options["do_sample"], options["temperature"], options["max_new_tokens"]) == (True, 0.5, 7)
    assert (greedy["do_sample"], options["eos_token_id"]) == (False, [0, 2])


def test_answers_of_earlier_results_stop_by_their_template(results, ask):
    """Their generation_config has the tokens of the base only."""
    (results / "whole" / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert ask(results / "whole", flags=("--once", "Say 0.")) == (0, ["aa"])


def test_the_first_turns_of_a_long_chat_are_left_out_and_it_is_said(results, ask):
    """A model has 256 positions."""
    assert ask(results / "whole", *[f"Say {'x ' * 60}"] * 4, flags=("--max_new_tokens", "4"))[0] == 0
    assert "its first turns are left out" in ask.err


def test_questions_from_a_pipe_stand_beside_their_answers(results, ask):
    """They go to stderr, so that a file of answers has the answers alone."""
    assert ask(results / "whole", "Say 1.", "", "Say 2.") == (0, ["bb", "cc"])
    assert [line for line in ask.err.splitlines() if line.startswith(">")] == ["> Say 1.", "> Say 2."]


def test_an_answer_can_be_stopped(results, ask, after_forward):
    """At the terminal the next question follows; an only answer ends the program."""
    stops = iter([True, False, True])

    def stop(model, outputs, input_ids, **_):
        if input_ids.shape[1] > 1 and next(stops):  # at the first token of an answer
            raise KeyboardInterrupt

    after_forward(transformers.LlamaForCausalLM, stop)
    code, lines = ask(results / "whole", "Say 1.", "Say 2.")
    assert (code, lines[-1]) == (0, "cc")
    assert ask(results / "whole", flags=("--once", "Say 1."))[0] == INTERRUPTED


def _config(folder: Path, **fields) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at, runs: at / "nowhere", "is no folder: give what a fine-tuning left"),
        (lambda at, runs: at, "holds no model .there is no config.json"),
        (lambda at, runs: (at / "checkpoint-7").mkdir() or at, "holds no finished model yet: .* chat .*checkpoint-7"),
        (lambda at, runs: (at / "model-00001-of-00002.safetensors").touch() or at, "weights that several processes share"),
        (lambda at, runs: save_base(at / "a", tokenizer=make_tokenizer(None)), "has no chat template"),
        (lambda at, runs: save_base(at / "a", tokenizer=make_tokenizer("{{ raise_exception('no') }}")), "template refuses it"),
        (lambda at, runs: _config(at / "a", architectures=["LlamaForSequenceClassification"]), "holds a reward model"),
    ],
)  # fmt: skip
def test_what_does_not_answer_is_one_clear_line(tmp_path, results, make, message):
    with pytest.raises(UsageError, match=message) as error:
        chat([str(make(tmp_path, results)), "--once", "a"])
    assert len(error.value.problems) == 1
    assert "\n" not in error.value.problems[0]


def test_a_model_of_another_kind_is_one_clear_line(tmp_path):
    tokenizer = make_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertForPreTraining(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="it is no causal language model, but a BertForPreTraining"):
        chat([str(tmp_path), "--once", "a"])


def test_a_model_of_images_is_one_line_that_says_how_to_ask_it(tmp_path):
    make_tokenizer().save_pretrained(tmp_path)
    transformers.LlavaConfig(architectures=["LlavaForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(
        UsageError,
        match=r'a LlavaForC\w+, of images and texts, which chat does not take: ask it by pipeline\("image-text',
    ):
        chat([str(tmp_path), "--once", "a"])


def test_an_adapter_without_its_base_is_one_clear_line(results, tmp_path):
    config = json.loads((results / "adapter" / "adapter_config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes((results / "adapter" / name).read_bytes())
    for base, message in (
        ("nowhere/at", r"an adapter of nowhere/at, cannot be loaded.* If its base is a folder, name it: --base FOLDER"),
        (
            "/nowhere/at/all",
            f"was trained on /nowhere/at/all, which is not here: put that folder, or a link to it, at {tmp_path}/base, or "
            "name it: --base FOLDER",
        ),
        (None, "names no base"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
        with pytest.raises(UsageError, match=message) as error:
            chat([str(tmp_path), "--once", "a"])
        assert "\n" not in error.value.problems[0]
    with pytest.raises(UsageError, match=r"holds no model .*: give the adapter's base"):
        chat([str(tmp_path), "--base", "/nowhere/at/all"])
    with pytest.raises(UsageError, match="holds no adapter: leave --base out"):
        chat([str(results / "base"), "--base", str(results / "base")])
    assert chat([str(tmp_path), "--base", str(results / "base"), "--once", "Say 2."]) == 0, "named"
    AutoModelForCausalLM.from_pretrained(results / "base").save_pretrained(tmp_path / "base")
    assert chat([str(tmp_path), "--once", "Say 2."]) == 0, "beside it"


def test_a_chat_without_a_question_is_one_clear_line(results, ask):
    with pytest.raises(UsageError, match=r"stdin is empty.* --once"):
        ask(results / "whole")
    sys.stdin.close()
    with pytest.raises(UsageError, match=r"stdin is closed.* --once"):
        chat([str(results / "whole")])
