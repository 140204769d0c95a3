"""WordPiece: trained deterministically and cached, or loaded strictly."""

import json

import pytest
from datasets import Dataset

from samestep.data import labelled_texts, sentence_pairs, token_blocks
from samestep.data.tokenizer import load_tokenizer, train_byte_level_bpe, train_characters, train_wordpiece
from samestep.errors import UsageError
from samestep.models.pretrained import find_config
from samestep.recipe import hub
from samestep.recipe.catalog import load

TEXTS = ["The quick brown fox jumps over the lazy dog. " * 9, "Déjà vu: the same words, twice over." * 9]


@pytest.fixture(autouse=True)
def cache(tmp_path, use_cache):
    use_cache(tmp_path / "cache")


def train(texts=TEXTS, vocab_size=90, lower=True):
    return train_wordpiece(Dataset.from_dict({"text": texts}), vocab_size, lower)


def test_the_same_documents_give_the_same_vocabulary(tmp_path, use_cache):
    first = train()
    use_cache(tmp_path / "other")
    again = train()
    assert first.get_vocab() == again.get_vocab()
    assert len(first) <= 90
    assert train(TEXTS[:1]).get_vocab() != first.get_vocab()


def test_it_is_trained_once(tmp_path):
    """What another training would write anew is read."""
    first = train()
    (file,) = (tmp_path / "cache").rglob("tokenizer.json")
    file.write_text(file.read_text().replace('"##ds"', '"##dz"'))
    assert train().get_vocab() != first.get_vocab()


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
    with pytest.raises(UsageError, match="has no eos_token: give one like GPT-2's"):
        load_tokenizer(str(tmp_path / "saved"), 90, ["eos_token"], "GPT-2")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", bytes(100), b'{"a": ', b"[]", b"[" * 10**5, b'{"vocab_size": ' + b"7" * 5000 + b"}", b"\xff"],
    ids=["empty", "zeros", "cut off", "list", "deep", "digits", "bytes"],
)
def test_files_that_are_no_tokenizer_are_one_clear_line(tmp_path, name, content):
    train().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / name).write_bytes(content)
    with pytest.raises(
        UsageError, match=r"^tokenizer .*/saved cannot be loaded \([^\n]+\): check the name or the folder$"
    ):
        load_tokenizer(str(tmp_path / "saved"), 90, ["mask_token"], "BERT")


def test_a_tokenizer_without_vocabulary_is_refused(tmp_path):
    """transformers would make one of the special tokens alone, to which every text is [UNK] [UNK] [UNK]."""
    train().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"has no vocabulary: it must hold tokenizer\.json"):
        load_tokenizer(str(tmp_path / "saved"), 90, ["mask_token"], "BERT")


def test_numbers_of_entries_count_not_how_many_there_are(tmp_path):
    """Each is a row of the embedding."""
    train().save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 5000
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"vocab_size is 90, but tokenizer .* has 5001 entries"):
        load_tokenizer(str(tmp_path / "saved"), 90, [], "BERT")


@pytest.mark.parametrize("make", [train_wordpiece, train_byte_level_bpe, train_characters])
def test_a_vocabulary_of_one_entry(make):
    lower = [True] if make is train_wordpiece else []
    with pytest.raises(UsageError, match=r"^vocab_size is 1, but .* set it to \d+ or more$"):
        make(Dataset.from_dict({"text": TEXTS}), 1, *lower)


ODD = "Tabs\tand\n\nlines, \u00e9\u00f1 \u4f60\u597d \U0001f600  two  spaces "


@pytest.mark.parametrize("train", [train_byte_level_bpe, train_characters])
def test_text_is_read_back_as_it_was_written(train, tmp_path, use_cache):
    documents = Dataset.from_dict({"text": [*TEXTS, ODD]})
    tokenizer = train(documents, 320)
    for text in (*TEXTS, ODD):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert len(tokenizer) <= 320
    use_cache(tmp_path / "other")
    assert train(documents, 320).backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_bytes_can_write_what_was_never_seen():
    tokenizer = train_byte_level_bpe(Dataset.from_dict({"text": TEXTS}), 300)
    assert tokenizer.decode(tokenizer(ODD)["input_ids"]) == ODD
    assert "<|endoftext|>" not in tokenizer.convert_ids_to_tokens(tokenizer(ODD)["input_ids"])
    with pytest.raises(UsageError, match="vocab_size is 256, but byte_level_bpe has all 256 bytes"):
        train_byte_level_bpe(Dataset.from_dict({"text": TEXTS}), 256)


def test_characters_in_order_and_the_rare_ones_unknown():
    documents = Dataset.from_dict({"text": ["bbaac"]})
    tokenizer = train_characters(documents, 99)
    assert tokenizer.get_vocab() == {"<|endoftext|>": 0, "<|unknown|>": 1, "a": 2, "b": 3, "c": 4}
    assert tokenizer("abz")["input_ids"] == [2, 3, 1]
    assert set(train_characters(documents, 4).get_vocab()) == {"<|endoftext|>", "<|unknown|>", "a", "b"}


# ---------------------------------------------------------------------------------------------------------------------
# Words that the tokenizer does not know


def build_pairs(path, texts, **changes):
    path.write_text("\n\n".join(texts) + "\n")
    recipe = load(
        "bert_small_cpu", {"train_file": [str(path)], "dataset_name": None, "validation_fraction": 0.0} | changes
    )
    return sentence_pairs.build(recipe)[0]


def test_words_that_are_too_long_are_said(tmp_path):
    """As in languages without spaces, and in sequences of genes."""
    long = "acgtacga" * 20
    source = build_pairs(tmp_path / "a.txt", [f"some short words here. {long} and more of them.\nAnother line."] * 20)
    (line,) = (line for line in str(source.row_reports[0]).splitlines() if "[UNK]" in line)
    assert "% of the tokens of training documents are [UNK], unknown: 'acgtacgaacgtacgaacgt'... (160 letters)" in line
    assert "a word has 100 letters at most, so put spaces between words" in line
    plain = build_pairs(tmp_path / "b.txt", ["some short words here.\nAnother line."] * 20)
    assert "[UNK]" not in str(plain.row_reports[0])


def test_before_the_hub_is_asked_one_line_says_how_to_do_without(monkeypatch, capsys, tmp_path):
    """The library is offline in tests, for it read the variable before: so nothing waits here."""
    hub.announce.cache_clear()
    capsys.readouterr()
    for value, count in (("1", 0), ("0", 1), ("0", 0)):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        name = f"nobody/nothing{value}"
        with pytest.raises(UsageError, match=f"tokenizer {name} cannot be loaded") as error:
            load_tokenizer(name, 9, (), "GPT-2")
        err = capsys.readouterr().err
        assert err == f"asking the hub for {name}; {hub.WAY_OUT}\n" * count
        assert ("HF_HUB_OFFLINE=1, which ends the wait" in str(error.value)) == (value == "0")
        assert find_config(name) is None
    with pytest.raises(UsageError):
        load_tokenizer(str(tmp_path), 9, (), "GPT-2")
    assert capsys.readouterr().err == "", "a folder"


def test_texts_of_unknown_words_alone_are_refused(tmp_path):
    texts = [f"{'天地玄黃' * 30}\n{'acgt' * 40}"] * 20
    file = tmp_path / "saved"
    train().save_pretrained(file)
    with pytest.raises(UsageError, match=r"^100.0% of the tokens of training documents are \[UNK\]"):
        build_pairs(tmp_path / "a.txt", texts, tokenizer_name=str(file), vocab_size=90)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "天 地", "label": n % 2}) + "\n" for n in range(20))
    )
    recipe = {"train_file": [str(tmp_path / "rows.jsonl")], "dataset_name": None, "tokenizer_name": str(file)}
    with pytest.raises(
        UsageError, match=r"^100.0% of the tokens of training texts are \[UNK\], unknown: '天', '地': give"
    ):
        labelled_texts.build(load("finetune_small_cpu", recipe | {"vocab_size": 90}))


def test_characters_that_are_left_out_of_the_vocabulary_are_said(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 200)
    recipe = {"train_file": [str(tmp_path / "a.txt")], "dataset_name": None, "validation_fraction": 0.0}
    recipe |= {"tokenizer": "characters", "tokenizer_name": None, "vocab_size": 7}
    source, _ = token_blocks.build(load("gpt2_small_cpu", recipe))
    assert "50.0% of the tokens of training documents are <|unknown|>, unknown: 'f', 'g', 'h'" in str(
        source.row_reports[0]
    )
    source, _ = token_blocks.build(load("gpt2_small_cpu", recipe | {"vocab_size": 12}))
    assert "unknown" not in str(source.row_reports[0])
