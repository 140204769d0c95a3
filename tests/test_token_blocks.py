"""Documents to runs of tokens: every token predicted once, masks inside documents, any block at once."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from common import tiny_argv
from datasets import Dataset
from hooks import before

from samestep.data import token_blocks
from samestep.data.token_blocks import PackedBlocks, SeparateDocuments
from samestep.data.tokenizer import train_byte_level_bpe
from samestep.errors import UsageError
from samestep.models import gpt2_pretraining
from samestep.recipe import run_settings as run


def build(corpus, flags: str = ""):
    recipe, _ = run.parse(tiny_argv("pretrain_gpt2", corpus, "unused", flags), "gpt2_pretraining", "")
    return token_blocks.build(recipe)


@pytest.fixture(scope="module")
def blocks(corpus) -> PackedBlocks:
    return build(corpus)[0]


@pytest.fixture(scope="module")
def stream(blocks) -> np.ndarray:
    return np.concatenate([blocks.tokens[row] for row in range(blocks.num_documents)])


def small(blocks, texts: list[str], kind=PackedBlocks, **settings):
    settings = {"block_size": 8, "seed": 1} | settings
    return kind(Dataset.from_dict({"text": texts}), blocks.tokenizer, **settings)


def test_a_document_is_its_text_after_the_mark(blocks, corpus):
    import json

    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    written = [blocks.tokenizer.decode(blocks.tokens[row][1:]) for row in range(blocks.num_documents)]
    assert set(written) <= set(texts), "byte-level BPE reads back what it wrote"
    assert all(blocks.tokens[row][0] == blocks.end_of_text for row in range(blocks.num_documents))
    assert blocks.tokens[0].dtype == np.uint16
    assert blocks.num_tokens == sum(len(blocks.tokens[row]) for row in range(blocks.num_documents))


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_token_is_predicted_once_per_epoch(blocks, stream, epoch):
    runs = [blocks.draw(epoch, sample_id) for sample_id in range(len(blocks))]
    assert [run.length for run in runs[:-1]] == [48] * (len(blocks) - 1)
    assert runs[-1].length == len(stream) - 48 * (len(blocks) - 1)
    predicted = np.concatenate([run.tokens[1:] for run in runs])
    read = np.concatenate([run.tokens[:-1] for run in runs])
    place = blocks.first_token(epoch)
    assert np.array_equal(read, np.roll(stream, -place))
    assert np.array_equal(predicted, np.roll(stream, -place - 1)), "the ring closes: the last token predicts the first"


def test_the_cut_of_the_ring_moves_with_the_epoch_and_the_seed(blocks, corpus):
    cuts = {blocks.first_token(epoch) for epoch in range(20)}
    assert len(cuts) > 15
    assert max(cuts) > blocks.num_tokens / 2 > min(cuts)
    assert build(corpus, "--seed 5 --validation_split tail")[0].first_token(0) != blocks.first_token(0)


def test_held_out_blocks_do_not_depend_on_seed_or_epoch(corpus):
    held_out = build(corpus)[1]
    assert held_out.seed is None
    assert held_out.draw(0, 0).tokens[0] == held_out.end_of_text
    assert np.array_equal(held_out.draw(3, 1).tokens, held_out.draw(0, 1).tokens)


def test_separate_documents_are_whole_or_cut(blocks):
    texts = ["a b c", "word " * 40]
    source = small(blocks, texts, SeparateDocuments)
    short, long = source.draw(0, 0).tokens, source.draw(0, 1).tokens
    assert (short[0], short[-1]) == (source.end_of_text, source.end_of_text)
    assert source.tokenizer.decode(short[1:-1]) == "a b c"
    assert len(long) == 9
    assert source.end_of_text not in long[1:]
    assert np.array_equal(long, source.tokens[1][:9])
    assert np.array_equal(source.draw(4, 1).tokens, long)


def test_a_document_exactly_as_long_as_a_block_keeps_its_end(blocks):
    source = small(blocks, ["x y", "x y"], SeparateDocuments)
    size = len(source.tokens[0])
    for block_size, expected in ((size - 1, False), (size, True), (size + 1, True)):
        run = small(blocks, ["x y", "x y"], SeparateDocuments, block_size=block_size).draw(0, 0)
        assert bool(run.tokens[-1] == source.end_of_text) is expected
        assert run.length == min(block_size, size)


def test_a_micro_batch(blocks):
    source = small(blocks, ["a b c", "word " * 40, "d"], SeparateDocuments)
    runs = [source.draw(0, sample_id) for sample_id in range(3)]
    micro_batch = source.collate(runs)
    longest = max(run.length for run in runs)
    assert micro_batch["input_ids"].shape == (3, longest)
    assert micro_batch["counts"].tolist() == [sum(run.length for run in runs)] == [len(micro_batch["labels"])]
    assert micro_batch["position_ids"] is None
    for row, sample in enumerate(runs):
        is_in_row = micro_batch["label_index"] // longest == row
        assert (micro_batch["label_index"][is_in_row] % longest).tolist() == list(range(sample.length))
        assert micro_batch["labels"][is_in_row].tolist() == sample.tokens[1:].tolist()
        assert micro_batch["input_ids"][row, : sample.length].tolist() == sample.tokens[:-1].tolist()
    assert source.collate(runs[1:2])["label_index"] is None, "nothing is padded"


def test_positions_start_anew_at_every_document(blocks):
    source = small(blocks, ["a", "b", "word " * 40], block_size=8, document_mask=True, seed=None)
    first, second = source.draw(0, 0), source.draw(0, 1)
    micro_batch = source.collate([first, second])
    for ids, positions in zip(micro_batch["input_ids"].tolist(), micro_batch["position_ids"].tolist(), strict=True):
        expected, since = [], 0
        for place, token in enumerate(ids):
            since = place if token == source.end_of_text else since
            expected.append(place - since)
        assert positions == expected
    assert micro_batch["position_ids"][0].tolist().count(0) >= 3


def test_attention_stays_inside_a_document(corpus):
    """With document_mask a document's loss in a block is its loss alone; without, it is not."""
    recipe, _ = run.parse(tiny_argv("pretrain_gpt2", corpus, "unused", ""), "gpt2_pretraining", "")
    texts = ["One document.", "Another one, a little longer."]
    for masked in (True, False):
        tokenizer = build(corpus)[0].tokenizer
        settings = {"block_size": 48, "document_mask": masked}
        whole = PackedBlocks(Dataset.from_dict({"text": texts}), tokenizer, **settings)
        alone = SeparateDocuments(Dataset.from_dict({"text": texts}), tokenizer, **settings)
        torch.manual_seed(0)
        model = (
            gpt2_pretraining.PretrainingSums(gpt2_pretraining.build_model(recipe, whole.end_of_text)).double().eval()
        )
        for attention in ("sdpa", "eager"):
            model.gpt2.set_attn_implementation(attention)
            totals = []
            for source in (whole, alone):
                micro_batch = source.collate([source.draw(0, sample_id) for sample_id in range(len(source))])
                counts = micro_batch.pop("counts")
                totals.append((model(**micro_batch)[0].item(), counts.item()))
            assert totals[0][1] == totals[1][1]
            assert (totals[0][0] == pytest.approx(totals[1][0], rel=1e-12)) is masked


def test_the_loss_is_the_published_models_own(blocks, corpus):
    """Our sum is that of transformers' GPT2LMHeadModel, which shifts the labels itself."""
    recipe, _ = run.parse(tiny_argv("pretrain_gpt2", corpus, "unused", ""), "gpt2_pretraining", "")
    torch.manual_seed(0)
    gpt2 = gpt2_pretraining.build_model(recipe, blocks.end_of_text).double().train()
    samples = [blocks.draw(0, sample_id) for sample_id in range(5)]
    micro_batch = blocks.collate(samples)
    counts = micro_batch.pop("counts")
    sums, _ = gpt2_pretraining.PretrainingSums(gpt2)(**micro_batch)
    logits = gpt2(micro_batch["input_ids"]).logits
    theirs = torch.nn.functional.cross_entropy(logits.flatten(0, 1), micro_batch["labels"], reduction="sum")
    assert sums.item() == pytest.approx(theirs.item(), rel=1e-12)
    # Their own loss predicts only what follows in the row, 47 of 48 tokens: position 0 is no target.
    mean = gpt2(micro_batch["input_ids"], labels=micro_batch["input_ids"]).loss
    inner = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), micro_batch["input_ids"][:, 1:].flatten())
    assert mean.item() == pytest.approx(inner.item(), rel=1e-6), "it computes its loss in float32"
    assert counts.item() == 5 * 48


def test_padding_changes_nothing(blocks, corpus):
    recipe, _ = run.parse(tiny_argv("pretrain_gpt2", corpus, "unused", ""), "gpt2_pretraining", "")
    source = small(blocks, ["a b c", "word " * 40, "d"], SeparateDocuments, block_size=40)
    torch.manual_seed(0)
    model = gpt2_pretraining.PretrainingSums(gpt2_pretraining.build_model(recipe, source.end_of_text)).double().eval()

    def total(runs) -> float:
        micro_batch = source.collate(runs)
        micro_batch.pop("counts")
        return model(**micro_batch)[0].item()

    runs = [source.draw(0, sample_id) for sample_id in range(3)]
    assert total(runs) == pytest.approx(sum(total([run]) for run in runs), rel=1e-13)


def test_an_empty_micro_batch_has_zero_loss_and_zero_gradients(blocks, corpus):
    recipe, _ = run.parse(tiny_argv("pretrain_gpt2", corpus, "unused", ""), "gpt2_pretraining", "")
    model = gpt2_pretraining.PretrainingSums(gpt2_pretraining.build_model(recipe, blocks.end_of_text)).train()
    micro_batch = blocks.collate([])
    assert micro_batch.pop("counts").tolist() == [0]
    sums, _ = model(**micro_batch)
    assert sums.tolist() == [0.0]
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} needs a gradient, or DistributedDataParallel waits for it"
        assert not parameter.grad.any()


def test_the_mark_inside_a_text_is_text(blocks):
    source = small(blocks, ["before <|endoftext|> after", "other text"], SeparateDocuments, block_size=60)
    tokens = source.tokens[0]
    assert (tokens == source.end_of_text).sum() == 1
    assert source.tokenizer.decode(tokens[1:]) == "before <|endoftext|> after"


def test_blocks_are_read_across_arrow_chunks(blocks):
    """Documents written by two processes lie in two files; a block that spans them is read all the same."""
    texts = [f"text number {number}" for number in range(40)]
    documents = Dataset.from_dict({"text": texts})
    settings = {"block_size": 8, "seed": None}
    whole = PackedBlocks(documents, blocks.tokenizer, **settings)
    documents = documents.select(range(40), new_fingerprint="of-two-processes")
    parts = PackedBlocks(documents, blocks.tokenizer, **settings, num_proc=2)
    assert len(parts.tokens.offsets) == 2
    assert parts.fingerprints == whole.fingerprints
    assert all(np.array_equal(parts.draw(0, i).tokens, whole.draw(0, i).tokens) for i in range(len(whole)))


def test_it_is_tokenized_once(corpus, tmp_path, use_cache):
    use_cache(tmp_path)
    build(corpus, "--validation_split tail")
    written = []
    with before("open", lambda path, mode, _: written.append(path) if str(mode)[0] in "wxa" else None):
        build(corpus, "--validation_split tail")
    assert [path for path in written if Path(str(path)).suffix == ".arrow"] == []
    assert list(tmp_path.rglob("*.arrow"))


def test_a_vocabulary_of_more_than_16_bits(blocks):

    class Large(type(blocks.tokenizer)):
        def __len__(self):
            return 70_000

    tokenizer = copy.copy(blocks.tokenizer)
    tokenizer.__class__ = Large
    documents = Dataset.from_dict({"text": ["one more text", "and another"]})
    source = PackedBlocks(documents, tokenizer, block_size=4, seed=1)
    assert source.tokens[0].dtype == np.int32


def test_a_corpus_smaller_than_a_block(blocks, corpus):
    with pytest.raises(
        UsageError, match=r"block_size is 500, but the corpus have \d+ tokens in all: lower --block_size"
    ):
        small(blocks, ["few words"], block_size=500)
    assert len(small(blocks, ["few words"], block_size=500, seed=None)) == 1, "held out, it is one shorter block"


def test_the_fingerprints_tell_tokenizer_from_documents(blocks, corpus):
    documents = Dataset.from_dict({"text": ["one more text, and another", "a b c"]})
    other = PackedBlocks(documents, train_byte_level_bpe(documents, 300), block_size=4, seed=1)
    same = PackedBlocks(documents, blocks.tokenizer, block_size=4, seed=1)
    assert same.fingerprints["tokenizer"] == blocks.fingerprints["tokenizer"] != other.fingerprints["tokenizer"]
    assert same.fingerprints["documents"] != blocks.fingerprints["documents"]
