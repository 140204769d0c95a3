"""WordPiece: trained deterministically and cached, or loaded strictly."""

import datasets
import pytest
from datasets import Dataset

from recipes.data.tokenizer import load_tokenizer, train_wordpiece
from recipes.errors import UsageError

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 9, "Déjà vu: the same words, twice over." * 9]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def train(texts=TEXTS, vocab_size=90, lower=True):
    return train_wordpiece(Dataset.from_dict({"text": texts}), vocab_size, lower)


def test_the_same_documents_give_the_same_vocabulary(tmp_path, monkeypatch):
    first = train()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "other")
    again = train()
    assert first.get_vocab() == again.get_vocab()
    assert len(first) <= 90
    assert train(TEXTS[:1]).get_vocab() != first.get_vocab()


def test_it_is_trained_once(monkeypatch):
    train()
    monkeypatch.setattr("recipes.data.tokenizer._wordpiece", lambda *arguments: pytest.fail("trained twice"))
    train()


def test_it_is_a_bert_tokenizer():
    tokenizer = train()
    assert tokenizer.tokenize("DÉJÀ") == tokenizer.tokenize("deja")
    assert train(lower=False).tokenize("Déjà") != train(lower=False).tokenize("deja")
    encoded = tokenizer("the dog", "the fox")
    text = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert (text[0], text.count("[SEP]")) == ("[CLS]", 2)
    assert encoded["token_type_ids"][-1] == 1
    assert tokenizer.mask_token == "[MASK]"


def test_loading(tmp_path):
    train().save_pretrained(tmp_path / "saved")
    assert load_tokenizer(str(tmp_path / "saved"), 90, ["mask_token"], "BERT").get_vocab() == train().get_vocab()
    with pytest.raises(UsageError, match="vocab_size is 20, but tokenizer"):
        load_tokenizer(str(tmp_path / "saved"), 20, [], "BERT")
    with pytest.raises(UsageError, match="tokenizer nowhere cannot be loaded"):
        load_tokenizer("nowhere", 90, [], "BERT")
