"""`samestep check-model`: what Trainer's step is with a head, found by a plain computation."""

import pytest
import torch
import transformers
from common import fresh_accelerator
from torch import nn

from samestep.cli.commands import COMMANDS
from samestep.contrib.heads import comparison, reading, table, tiny
from samestep.contrib.heads.command import check_model
from samestep.contrib.heads.samples import Samples
from samestep.contrib.heads.sizes import find_parts, make_config
from samestep.errors import UsageError


@pytest.fixture(autouse=True)
def one_process():
    threads = torch.get_num_threads()
    fresh_accelerator()
    yield
    fresh_accelerator()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "verdict", "norms"),
    [
        ("BertForSequenceClassification", comparison.TIMES_K, (2, 4)),
        ("BertForQuestionAnswering", comparison.MEAN_OF_MEANS, (1, 1)),
        ("LlamaForCausalLM", comparison.EXACT, (1, 1)),
        ("ViTForImageClassification", comparison.EXACT, (1, 1)),
        ("Wav2Vec2ForCTC", comparison.EXACT, (1, 1)),
        ("Qwen2_5_VLForConditionalGeneration", comparison.MEAN_OF_MEANS, (1.01303, 1.07408)),
    ],
)
def test_heads_of_each_kind(name, verdict, norms):
    """transformers 5.24: a newer one that has mended a head fails here, and docs/state-of-the-step.md is to be written anew."""
    head = tiny.find_head(name)
    found = comparison.compare(head.build, head.samples)
    assert found.verdict == verdict
    assert found.norms == pytest.approx(norms, rel=1e-4)
    assert found.exact_error < 1e-5
    assert reading.read_head(getattr(transformers, name)).verdict == verdict
    assert (found.error < 1e-5) == (verdict == comparison.EXACT)
    assert found.refusal == found.packing == ""


def test_a_head_that_sees_padding_and_one_whose_packed_rows_leak():
    head = tiny.find_head("FNetForSequenceClassification")
    found = comparison.compare(head.build, head.samples)
    assert "padding" in found.refusal
    assert found.exact_error is None
    head = tiny.find_head("MambaForCausalLM")
    assert "logits differ by" in comparison.compare(head.build, head.samples).packing


class Mended(transformers.BertForSequenceClassification):
    """A head that uses the number of targets, and as a control one that divides by twice as much."""

    factor = 1

    def forward(self, input_ids=None, attention_mask=None, labels=None, num_items_in_batch=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask)
        total = nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        is_step = num_items_in_batch is not None
        outputs.loss = total / (self.factor * num_items_in_batch if is_step else len(labels))
        return outputs


class Halved(Mended):
    factor = 2


def test_verdicts_follow_the_head():
    config = make_config(transformers.BertConfig())

    def compare(made):
        def build():
            torch.manual_seed(0)
            return made(config)

        return comparison.compare(build, Samples("sequence classification"))

    assert compare(Mended).verdict == comparison.EXACT
    found = compare(Halved)
    assert (found.verdict, found.norms) == (comparison.OTHER, pytest.approx((0.5, 0.5)))
    assert found.exact_error < 1e-6


def test_what_says_nothing_is_not_measured():
    class Still(Mended):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            outputs.loss = outputs.loss * 0
            return outputs

    with pytest.raises(comparison.NotMeasuredError, match="or 0"):
        comparison.compare(lambda: Still(make_config(transformers.BertConfig())), Samples("sequence classification"))


TEXTS = [*tiny.KINDS][: [*tiny.KINDS].index("causal language model") + 1]


@pytest.mark.parametrize("kind", TEXTS)
def test_samples_differ_in_length_and_targets(kind):
    samples = Samples(kind)
    batch = samples.join([samples.draw(number) for number in range(7)])
    assert batch.keys() >= {"input_ids", "attention_mask"}
    assert len(set(batch["attention_mask"].flatten(0, -2).sum(-1).tolist())) > 3
    if kind in ("token classification", "masked language model", "causal language model", "sequence to sequence"):
        assert len(set((batch["labels"] != -100).sum(1).tolist())) > 2


@pytest.mark.parametrize(
    ("name", "verdict", "takes_number", "uses_number"),
    [
        ("BertForMaskedLM", comparison.TIMES_K, True, False),
        ("LlamaForSequenceClassification", comparison.TIMES_K, True, False),
        ("ModernBertForMaskedLM", comparison.EXACT, True, True),
        ("EsmForMaskedLM", comparison.MEAN_OF_MEANS, False, False),
        ("DetrForObjectDetection", comparison.MEAN_OF_MEANS, True, False),
        ("SegformerForSemanticSegmentation", comparison.TIMES_K, True, False),
        ("DPTForDepthEstimation", reading.NO_LOSS, True, False),
    ],
)
def test_heads_that_are_read(name, verdict, takes_number, uses_number):
    """As they were run in benchmarks/results/state.json, but the last, which says that its training is not implemented."""
    assert reading.read_head(getattr(transformers, name)) == reading.Reading(verdict, takes_number, uses_number)


class CorrectedForSequenceClassification(transformers.BertForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask)
        outputs.loss = self.loss_function(labels, outputs.logits, self.config, **kwargs)
        return outputs


class DroppedForSequenceClassification(CorrectedForSequenceClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels=labels)


class RefusedForSequenceClassification(CorrectedForSequenceClassification):
    accepts_loss_kwargs = False


def test_reading_follows_the_head():
    """A name that is passed on, one that is dropped on the way, and an attribute that Trainer believes."""
    classes = (
        CorrectedForSequenceClassification,
        DroppedForSequenceClassification,
        RefusedForSequenceClassification,
    )
    verdicts = [reading.read_head(made).verdict for made in classes]
    assert verdicts == [comparison.EXACT, comparison.TIMES_K, comparison.MEAN_OF_MEANS]


def test_configurations_that_lie_in_one_are_made_small():
    config = make_config(transformers.Qwen2_5_VLConfig())
    parts = find_parts(config)
    assert parts.keys() == {"text_config", "vision_config"}
    assert {part.hidden_size for part in parts.values()} == {32}
    assert parts["text_config"].num_hidden_layers == parts["vision_config"].depth == 2
    assert len(parts["text_config"].layer_types) == 2
    assert sum(parts["text_config"].rope_parameters["mrope_section"]) == 8


def test_what_is_small_already_stays():
    """It is not what the class has if nobody says it: a Llama of 32 layers."""
    config = make_config(transformers.LlamaConfig(num_hidden_layers=2, hidden_size=32))
    assert (config.num_hidden_layers, config.hidden_size) == (2, 32)


def test_all_heads_in_a_table(capfd):
    """The list is given, as the whole one takes half an hour."""
    names = ["T5ForConditionalGeneration", "LayoutLMv2ForTokenClassification", "DPTForDepthEstimation"]
    assert not table.print_table(names)
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] == "sequence to sequence:"
    assert lines[1].split(maxsplit=1)[1].startswith("k times too large, error 3e+00; exact(Trainer): ")
    assert "not run (needs the package detectron2); read: k times too large" in lines[3]
    assert "not run (NotImplementedError: " in lines[5]
    assert lines[5].endswith("read: computes no loss")
    assert lines[6] == "3 heads, 1 run: 1 k times too large"
    assert err.endswith("3 of 3 heads\n")
    assert table.print_table(["LlamaForCausalLM"])


def test_the_command(tmp_path, capsys):
    """A class, and a folder with its own configuration, of any size."""
    transformers.BertConfig(hidden_size=4096, num_hidden_layers=48, num_attention_heads=64).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("{", '{"architectures": ["BertForTokenClassification"],', 1), encoding="utf-8")
    assert check_model([str(tmp_path), "LlamaForCausalLM"]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == f"checking {tmp_path}, LlamaForCausalLM: Trainer's step in several cuts"
    lines = out.splitlines()
    assert lines[0].startswith("BertForTokenClassification, transformers ")
    assert any("k times too large" in line for line in lines)
    assert any("do: from samestep import exact" in line for line in lines)
    assert check_model(["LlamaForCausalLM"]) == 0
    assert "exact, error" in capsys.readouterr().out


def test_bad_words(tmp_path, capsys):
    def ask(word: str) -> str:
        assert check_model([word]) == 2
        first, line = capsys.readouterr().err.splitlines()
        assert first == f"checking {word}: Trainer's step in several cuts"
        return line

    assert "did you mean BertForSequenceClassification" in ask("BertForSequenceClasification")
    assert "no configuration could be read" in ask(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert", "hidden_size": "x"}', encoding="utf-8")
    assert "no configuration could be read: Validation error for field 'hidden_size'" in ask(str(tmp_path))
    assert "and no folder" in ask(str(tmp_path / "nothing"))
    transformers.ViTConfig(architectures=["ViTModel"]).save_pretrained(tmp_path)
    assert "names ViTModel, which is no head with targets" in ask(str(tmp_path))
    assert "ViTModel takes no targets" in ask("ViTModel")
    missing = ask("LayoutLMv2ForTokenClassification")
    assert "cannot be run in small sizes: needs the package detectron2. Read in its source" in missing
    assert missing.endswith("k times too large")
    for words in ([], ["--all", "LlamaForCausalLM"]):
        with pytest.raises(UsageError, match="give models, or --all"):
            check_model(words)
    with pytest.raises(UsageError):
        tiny.find_head("nothing")
    assert "check-model" in COMMANDS
