"""Documents to masked sentence pairs, on real text."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from common import TINY
from datasets import Dataset

from samestep.data import sentence_pairs
from samestep.data.ragged import round_up
from samestep.data.sentence_pairs import SentencePairs, _chunk
from samestep.errors import UsageError
from samestep.models import bert_pretraining
from samestep.recipe import run_settings as run

SETTINGS = {
    "seed": 1,
    "max_seq_length": 48,
    "short_seq_probability": 0.1,
    "next_sentence_probability": 0.5,
    "mlm_probability": 0.15,
}


@pytest.fixture(scope="module")
def pairs(corpus) -> SentencePairs:
    recipe, _ = run.parse([*TINY, "--train_file", str(corpus)], "bert_pretraining", "")
    return sentence_pairs.build(recipe)[0]


def rebuilt(pairs: SentencePairs, texts: list[str], **changes) -> SentencePairs:
    recipe = SimpleNamespace(**SETTINGS | changes)
    return SentencePairs(Dataset.from_dict({"text": texts}), pairs.tokenizer, recipe)


def find_place(row: np.ndarray, segment: np.ndarray) -> int | None:
    """Find the place of `segment` in `row`, by identity of memory: segments are views, nothing is copied."""
    place = (segment.__array_interface__["data"][0] - row.__array_interface__["data"][0]) // row.itemsize
    return place if 0 <= place <= len(row) - len(segment) else None


def test_b_follows_a_or_comes_from_another_document(pairs):
    for sample_id in range(len(pairs)):
        pair = pairs.draw(0, sample_id)
        rows, _ = pairs.cuts.find_gap(sample_id)
        a, b = (find_place(pairs.tokens[rows], segment) for segment in (pair.first, pair.second))
        assert a is not None
        if pair.is_random:
            assert b is None, "a random B must not be of the same document"
        else:
            assert b >= a + len(pair.first), "B must follow A"
            gap = set(range(a + len(pair.first), b))
            assert len(pair.first) + len(pair.second) == pairs.max_tokens or not gap, "a gap only where a pair was cut"


def test_lengths_and_shares(pairs):
    samples = [pairs.draw(epoch, sample_id) for epoch in range(6) for sample_id in range(len(pairs))]
    lengths = np.array([pair.length for pair in samples])
    assert lengths.max() == 48
    assert all(len(pair.first) and len(pair.second) for pair in samples)
    labels = np.array([pair.is_random for pair in samples])
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / len(samples) ** 0.5
    # A random B is about as long as the true one.
    second = np.array([len(pair.second) for pair in samples])
    assert abs(second[labels == 0].mean() - second[labels == 1].mean()) < 2


def test_probabilities_of_the_recipe_are_obeyed(pairs, corpus):
    texts = [" ".join(f"Word {n} of {d}." for n in range(300)) for d in range(3)]
    always = rebuilt(pairs, texts, next_sentence_probability=1.0)
    never = rebuilt(pairs, texts, next_sentence_probability=0.0)
    assert not any(always.draw(0, i).is_random for i in range(len(always)))
    assert all(never.draw(0, i).is_random for i in range(len(never)))
    assert len(rebuilt(pairs, texts, short_seq_probability=1.0)) > 1.3 * len(
        rebuilt(pairs, texts, short_seq_probability=0.0)
    )


def test_draws_are_functions_of_seed_epoch_and_sample(pairs):
    def everything(epoch: int) -> list[bytes]:
        return [b"".join(part.tobytes() for part in pairs.mask(pairs.draw(epoch, i))) for i in range(50)]

    def segments(epoch: int) -> list[tuple]:
        pairs_of_epoch = [pairs.draw(epoch, i) for i in range(50)]
        return [(pair.first.tobytes(), pair.second.tobytes()) for pair in pairs_of_epoch]

    assert segments(3) == segments(3)
    assert sum(a == b for a, b in zip(segments(3), segments(4), strict=True)) < 15, "pairs are drawn anew in each epoch"
    assert everything(3) == everything(3)
    assert sum(a == b for a, b in zip(everything(3), everything(4), strict=True)) == 0


def test_masks(pairs):
    """80 % [MASK], 10 % random, 10 % kept, of 15 %; special tokens never; the true tokens are the labels."""
    ids, kinds, special = pairs.tokenizer, np.zeros(3), pairs.is_special
    for sample_id in range(len(pairs)):
        for epoch in range(4):
            pair = pairs.draw(epoch, sample_id)
            tokens, places, labels = pairs.mask(pair)
            true = np.concatenate([[ids.cls_token_id], pair.first, [ids.sep_token_id], pair.second, [ids.sep_token_id]])
            assert np.array_equal(true[places], labels)
            assert not special[labels].any()
            assert len(places) == len(set(places)) == max(1, round(0.15 * (~special[true]).sum()))
            untouched = np.setdiff1d(np.arange(len(true)), places)
            assert np.array_equal(tokens[untouched], true[untouched])
            is_mask = tokens[places] == ids.mask_token_id
            assert not special[tokens[places]][~is_mask].any()
            is_unchanged = tokens[places] == labels
            kinds += [is_mask.sum(), (~is_mask & ~is_unchanged).sum(), is_unchanged.sum()]
    assert kinds / kinds.sum() == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_special_tokens_inside_a_text_are_not_masked(pairs):
    source = rebuilt(pairs, ["One [MASK] two. Three [SEP] four.", "Five six. Seven eight."], mlm_probability=1.0)
    for sample_id in range(len(source)):
        assert not source.is_special[source.mask(source.draw(0, sample_id))[2]].any()


def test_collate(pairs):
    samples = [pairs.draw(0, sample_id) for sample_id in range(7)]
    micro_batch = pairs.collate(samples)
    lengths = [pair.length for pair in samples]
    starts = np.cumsum(lengths) - lengths
    num_tokens = sum(lengths)
    assert micro_batch["input_ids"].shape == micro_batch["token_type_ids"].shape == (1, round_up(num_tokens, 6))
    assert micro_batch["is_token"].sum((1, 2, 3)).tolist() == lengths
    row = {name: micro_batch[name][0, :num_tokens].tolist() for name in ("input_ids", "token_type_ids", "position_ids")}
    assert row["position_ids"] == [place for length in lengths for place in range(length)]
    second = [[place >= len(pair.first) + 2 for place in range(pair.length)] for pair in samples]
    assert row["token_type_ids"] == np.concatenate(second).tolist()
    assert micro_batch["queries"][micro_batch["first_index"]].tolist() == starts.tolist()
    masked = [pairs.mask(pair) for pair in samples]
    places = np.concatenate([positions + start for (_, positions, _), start in zip(masked, starts, strict=True)])
    assert micro_batch["counts"].tolist() == [len(places), 7]
    assert micro_batch["queries"][micro_batch["masked_index"]][: len(places)].tolist() == places.tolist()
    assert len(micro_batch["masked_index"]) == len(micro_batch["masked_labels"]) == round_up(len(places), 6)
    assert micro_batch["query_ends"].diff().tolist() == [1 + len(positions) for _, positions, _ in masked]
    assert row["input_ids"] == np.concatenate([tokens for tokens, _, _ in masked]).tolist()
    labels = np.concatenate([labels for _, _, labels in masked]).tolist()
    assert micro_batch["masked_labels"].tolist() == labels + [-100] * (len(micro_batch["masked_labels"]) - len(labels))
    assert micro_batch["next_sentence_label"].tolist() == [pair.is_random for pair in samples]


def test_an_empty_micro_batch_has_zero_loss_and_zero_gradients(pairs):
    recipe, _ = run.parse(TINY, "bert_pretraining", "")
    model = bert_pretraining.PretrainingSums(bert_pretraining.build_model(recipe)).train()
    micro_batch = pairs.collate([])
    assert micro_batch.pop("counts").tolist() == [0, 0]
    sums, _ = model(**micro_batch)
    assert sums.tolist() == [0.0, 0.0]
    sums.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} needs a gradient, or DistributedDataParallel waits for it"
        assert not parameter.grad.any()


def test_masked_places_alone_give_the_published_model_its_own_loss(pairs):
    """Our sums are those of transformers' BertForPreTraining, which scores every place."""
    recipe, _ = run.parse(TINY, "bert_pretraining", "")
    torch.manual_seed(0)
    bert = bert_pretraining.build_model(recipe).double().train()
    samples = [pairs.draw(0, sample_id) for sample_id in range(9)]
    shape = (9, max(pair.length for pair in samples))
    ids, kinds, is_token = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    labels = torch.full(shape, -100)
    for row, pair in enumerate(samples):
        tokens, places, targets = pairs.mask(pair)
        ids[row, : pair.length], is_token[row, : pair.length] = torch.from_numpy(tokens), 1
        kinds[row, len(pair.first) + 2 : pair.length] = 1
        labels[row, places] = torch.from_numpy(targets)
    next_sentence = torch.tensor([pair.is_random for pair in samples])
    theirs = bert(ids, is_token, kinds, labels=labels, next_sentence_label=next_sentence).loss
    micro_batch = pairs.collate(samples)
    counts = micro_batch.pop("counts")
    sums, _ = bert_pretraining.PretrainingSums(bert)(**micro_batch)
    assert (sums / counts).sum().item() == pytest.approx(theirs.item(), rel=1e-12)


def test_chunks_hold_two_sentences_or_more():
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = rng.integers(1, 60, size=rng.integers(2, 40))
        cuts = _chunk(lengths, 45, 0.1, rng)
        assert (cuts[0], cuts[-1]) == (0, len(lengths))
        assert (np.diff(cuts) >= 2).all()


def test_one_long_sentence_becomes_two_segments(pairs):
    source = rebuilt(pairs, ["word " * 5, "word " * 500, "One. Two."])
    assert len(source.tokens) == 3
    assert all(len(source.tokens[row]) == source.ends[row][-1] for row in range(3))
    assert all(source.draw(0, i).length <= 48 for i in range(len(source)))


def test_one_document_is_not_enough(pairs):
    with pytest.raises(UsageError, match=r"has 1 document.* need at least 2"):
        rebuilt(pairs, ["One sentence. And another."])


def test_the_number_of_processes_and_the_batches_do_not_matter(pairs, corpus, tmp_path, use_cache):
    recipe, _ = run.parse([*TINY, "--train_file", str(corpus)], "bert_pretraining", "")
    use_cache(tmp_path)
    two, _ = sentence_pairs.build(recipe, num_proc=2)
    assert len(two.tokens.offsets) > 1, "two processes write two files"
    assert two.fingerprints == pairs.fingerprints
    assert all(np.array_equal(two.tokens[row], pairs.tokens[row]) for row in range(len(pairs.tokens)))
    assert two.draw(2, 17).first.tolist() == pairs.draw(2, 17).first.tolist()


def test_the_fingerprint_follows_the_data(pairs, corpus):
    texts = ["One two. Three four.", "Five six. Seven eight.", "Nine ten. Eleven twelve."]
    prints = {rebuilt(pairs, part).fingerprints["documents"] for part in (texts[:2], texts, texts[::-1])}
    assert len(prints) == 3
