"""Tokenizers (WordPiece, byte-level BPE, characters): trained on the corpus once, or loaded; and what they make of texts."""

import hashlib
import itertools
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data.arrow import Dataset, ListColumn, datasets, hash_parts
from samestep.data.row_report import RowReport
from samestep.errors import UsageError, explain_unwritable, reason
from samestep.printing import format_count
from samestep.recipe import hub
from samestep.recipe.reading import check_model_folder, format_name

MIN_UNKNOWN = 0.01  # share of unknown tokens of which a run says nothing
BLOCK, MAX_BLOCKS = 10**5, 200  # tokens that are counted at once, and how many times, about, spread over all
MAX_CHARACTERS = 1000  # the most frequent ones; others become [UNK]
END_OF_TEXT, UNKNOWN = "<|endoftext|>", "<|unknown|>"
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class TokenizedTexts:
    """Texts as tokens, in a memory-mapped file: what the samples of several tasks have in common.

    Args:
        table: one row per text, column `tokens`.
        texts: columns of texts, from which examples of unknown words come.
        tokenizer: of the tokens.
        max_length: tokens of a sample at most.
        description: names the texts in messages.

    Attributes:
        notes: lines on the texts for people.
        row_reports: what became of the rows of each source; empty until they are set.

    Raises:
        UsageError: all of the tokens are unknown.
    """

    def __init__(
        self, table: Dataset, texts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, description: str
    ):
        tokenizer.model_max_length = max_length  # saved with it: a pipeline truncates to that
        self.tokenizer, self.max_length, self.description = tokenizer, max_length, description
        self.tokens = ListColumn(table, "tokens")
        unknown = describe_unknown(self.tokens, texts, tokenizer, description)
        self.notes = [unknown] if unknown else []
        self.row_reports: list[RowReport] = []

    def __len__(self) -> int:
        raise NotImplementedError

    def __str__(self) -> str:
        """Say how many samples there are, and of how much text."""
        return f"{len(self):,} samples of {format_count(self.num_documents, 'document')} ({self.num_tokens:,} tokens)"

    @property
    def num_documents(self) -> int:
        """Number of texts."""
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all texts, with the special ones that are kept with them."""
        return self.tokens.num_values


def choose_tokenizer(
    recipe: Any, train: Callable[[], PreTrainedTokenizerBase], required_tokens: Sequence[str], example: str
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that a recipe names, or that of its model's folder; train one if it names none.

    Args:
        train: trains one.
        required_tokens, example: see `load_tokenizer`.
    """
    weights = getattr(recipe, "model_name_or_path", None)
    name = recipe.tokenizer_name or weights
    if name is None:
        return train()
    return load_tokenizer(name, recipe.vocab_size, required_tokens, example, is_required=weights is not None)


def train_wordpiece(documents: Dataset, vocab_size: int, do_lower_case: bool) -> PreTrainedTokenizerBase:
    """Train BERT's WordPiece tokenizer (Devlin et al. 2019, 1810.04805), once: it is saved in the datasets' cache.

    The same documents give the same vocabulary. A small corpus may fill fewer than `vocab_size` entries; the model's
    embedding keeps `vocab_size` rows all the same, so that the recipe alone decides its shape.

    Args:
        documents: one row per document, column `text`.
        vocab_size: entries at most.
        do_lower_case: lower-case and strip accents.
    """
    return _train_once("wordpiece", documents, _wordpiece, vocab_size, do_lower_case)


def train_byte_level_bpe(
    documents: Dataset, vocab_size: int, *, splits_digits: bool = False
) -> PreTrainedTokenizerBase:
    """Train GPT-2's byte-level BPE tokenizer (Radford et al. 2019), once. Any text can be written in it, and read back.

    Arguments, determinism and cache are as in `train_wordpiece`. The 256 bytes and <|endoftext|> are always in the vocabulary.

    Args:
        splits_digits: whether each digit of a number is a token of its own, which makes arithmetic learnable.

    Raises:
        UsageError: vocab_size is below 257.
    """
    min_size = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < min_size:
        raise UsageError(
            f"vocab_size is {vocab_size}, but byte_level_bpe has all 256 bytes and {END_OF_TEXT}: set it to {min_size} or more"
        )
    settings = (splits_digits,) if splits_digits else ()
    return _train_once("byte_level_bpe", documents, _byte_level_bpe, vocab_size, *settings)


def train_characters(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a tokenizer of single characters, in the order of their code points; as `train_wordpiece` otherwise.

    The vocabulary is <|endoftext|>, <|unknown|> for characters that the documents lack, and the documents' most frequent
    `vocab_size` - 2 characters.
    """
    return _train_once("characters", documents, _characters, vocab_size)


def _train_once(
    kind: str, documents: Dataset, train: Callable[..., PreTrainedTokenizerBase], vocab_size: int, *settings: object
) -> PreTrainedTokenizerBase:
    """Train a tokenizer by `train` (texts, vocab_size, *settings), unless the cache has it.

    Raises:
        UsageError: the entries that the tokenizer cannot do without are more than `vocab_size`.
    """
    key = hash_parts(rows_fingerprint(documents), vocab_size, *settings, tokenizers.__version__)
    folder = Path(datasets.config.HF_DATASETS_CACHE) / kind / key
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        train(documents["text"], vocab_size, *settings).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another run was first, with the same result
            shutil.rmtree(partial)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if len(tokenizer) > vocab_size:
        raise UsageError(
            f"vocab_size is {vocab_size}, but the special tokens and characters of the training text alone are "
            f"{len(tokenizer)}: set it to {len(tokenizer)} or more"
        )
    return tokenizer


def _byte_level_bpe(texts: Iterable[str], vocab_size: int, splits_digits: bool = False) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splits_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT
    )


def _characters(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    counts = Counter()
    for text in texts:
        counts.update(text)
    characters = sorted(sorted(counts, key=lambda c: (-counts[c], c))[: max(0, vocab_size - 2)])
    vocabulary = {token: number for number, token in enumerate([END_OF_TEXT, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=UNKNOWN
    )


def _wordpiece(texts: Iterable[str], vocab_size: int, do_lower_case: bool) -> PreTrainedTokenizerBase:
    """Train WordPiece with the trainer of `tokenizers`, made deterministic.

    The trainer numbers the characters inside words (##a, ##b, ...) in the order of a randomly seeded hash map, and breaks
    ties between merges by these numbers, so that two trainings on the same texts differ. Here characters are numbered first.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    characters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:MAX_CHARACTERS]
    inside_words = [f"##{c}" for c in characters if len(tokenizer.pre_tokenizer.pre_tokenize_str(f"a{c}")) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS + inside_words,
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A new tokenizer of the same vocabulary, in which ##a is no special token.
    vocabulary = tokenizer.get_vocab()
    result = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    result.normalizer, result.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    result.decoder = decoders.WordPiece(prefix="##")
    result.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=result, do_lower_case=do_lower_case)


def load_tokenizer(
    name_or_path: str, vocab_size: int, required_tokens: Sequence[str], example: str, *, is_required: bool = True
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub.

    Args:
        name_or_path: a folder, or a name on the hub.
        vocab_size: rows of the model's embedding.
        required_tokens: special tokens that it must have ("mask_token", "eos_token", ...).
        example: names, in the message, a model whose tokenizer would do.
        is_required: whether no other tokenizer would do, as for weights that were trained with it, for the message.

    Raises:
        UsageError: a tokenizer that cannot be loaded, lacks a required token, or has more than `vocab_size` entries.
    """
    check_model_folder(Path(name_or_path).expanduser(), f"tokenizer {format_name(name_or_path)}")
    hub.announce(name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        entries = tokenizer.backend_tokenizer.get_vocab()
    except Exception as error:  # of any kind: the files were written by others
        if problem := explain_unwritable(error):
            raise UsageError(problem) from None
        raise UsageError(
            f"tokenizer {name_or_path} cannot be loaded ({reason(error)}): check the name or the folder"
            f"{'' if is_required else ', or train one on the text: --tokenizer_name none'}{hub.describe_way_out(name_or_path)}"
        ) from None
    missing_tokens = [name for name in required_tokens if getattr(tokenizer, name) is None]
    if missing_tokens:
        raise UsageError(f"tokenizer {name_or_path} has no {', '.join(missing_tokens)}: give one like {example}'s")
    if entries.keys() <= set(tokenizer.all_special_tokens):  # so transformers loads a folder without one
        raise UsageError(
            f"tokenizer {name_or_path} has no vocabulary: it must hold tokenizer.json, or what it is made of"
        )
    num_entries = max(len(tokenizer), 1 + max(entries.values()))
    if num_entries > vocab_size:
        raise UsageError(
            f"vocab_size is {vocab_size}, but tokenizer {name_or_path} has {num_entries} entries: set --vocab_size to "
            f"{num_entries} or more"
        )
    return tokenizer


def describe_unknown(tokens: ListColumn, texts: Dataset, tokenizer: PreTrainedTokenizerBase, name: str) -> str | None:
    """Say which share of the tokens is the one for unknown words, with examples and a remedy; None: `MIN_UNKNOWN` at most.

    Args:
        tokens: of all texts, or more of them than of others; of many a part is counted, spread over all.
        texts: columns of texts, from which the examples come.
        name: names the texts in messages.

    Raises:
        UsageError: all of the tokens are unknown.
    """
    unknown = tokenizer.unk_token_id
    if unknown is None or unknown == tokenizer.eos_token_id or not tokens.num_values:
        return None
    num_blocks = -(-tokens.num_values // BLOCK)
    step = max(1, num_blocks // MAX_BLOCKS)
    counts = np.zeros(len(tokenizer), np.int64)
    for start in range(0, tokens.num_values, step * BLOCK):
        counts += np.bincount(tokens.read(start, min(start + BLOCK, tokens.num_values)), minlength=len(tokenizer))
    num_unknown = counts[unknown]
    num_words = counts.sum() - sum(counts[token] for token in set(tokenizer.all_special_ids) - {unknown})
    if num_unknown <= MIN_UNKNOWN * num_words:
        return None
    words = list(itertools.islice(_find_unknown_words(texts, tokenizer), 3))
    examples = ", ".join(f"{word[:20]!r}{f'... ({len(word):,} letters)' if len(word) > 20 else ''}" for word in words)
    remedy = "give --tokenizer_name of a model that was trained on such texts"
    most = getattr(tokenizer.backend_tokenizer.model, "max_input_chars_per_word", None)
    if most is not None and any(len(word) > most for word in words):
        remedy = f"a word has {most} letters at most, so put spaces between words, or {remedy}"
    share = num_unknown / num_words
    text = f"{share:.1%} of the tokens of {name} are {tokenizer.unk_token}, unknown: {examples}: {remedy}"
    if num_unknown == num_words and step == 1:
        raise UsageError(text)
    return text


def _find_unknown_words(texts: Dataset, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Find words that the tokenizer does not know in the first texts, each once."""
    found = set()
    for row in texts.select(range(min(len(texts), 1000))):
        for text in filter(None, row.values()):
            encoding = tokenizer(text[:100_000], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            for token, (start, end) in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
                if token == tokenizer.unk_token_id and text[start:end] not in found:
                    found.add(text[start:end])
                    yield text[start:end]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hex digits of a SHA-256 of everything that decides how a tokenizer cuts text.

    A call that cuts a text off, or pads it, leaves its length behind in the tokenizer. Each call sets its own, so that of an
    earlier one is taken away: where tokens come from a cache there was none. So a saved tokenizer is the same, too.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()[:16]
