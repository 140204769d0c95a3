"""WordPiece tokenizers: trained on the corpus, or loaded."""

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import datasets
import tokenizers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerBase

from recipes.errors import UsageError

MAX_CHARACTERS = 1000  # the most frequent ones; others become [UNK]
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_wordpiece(documents: Dataset, vocab_size: int, do_lower_case: bool) -> PreTrainedTokenizerBase:
    """Train BERT's WordPiece tokenizer (Devlin et al. 2019, 1810.04805), once: it is kept in the datasets' cache.

    The same documents give the same vocabulary. A small corpus may fill fewer than `vocab_size` entries; the model's
    embedding keeps `vocab_size` rows all the same, so that the recipe alone decides its shape.

    Args:
        documents: one row per document, column `text`.
        vocab_size: most entries.
        do_lower_case: lower-case and strip accents.
    """
    key = repr((documents._fingerprint, vocab_size, do_lower_case, tokenizers.__version__))
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "wordpiece" / hashlib.sha256(key.encode()).hexdigest()[:16]
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        _train(documents["text"], vocab_size, do_lower_case).save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:  # another run was first, with the same result
            shutil.rmtree(partial)
    return AutoTokenizer.from_pretrained(folder)


def _train(texts: Iterable[str], vocab_size: int, do_lower_case: bool) -> PreTrainedTokenizerBase:
    """`tokenizers`' trainer, made deterministic.

    The trainer numbers the characters inside words (##a, ##b, ...) in the order of a randomly seeded hash map, and breaks
    ties between merges by these numbers, so that two trainings on the same texts differ. Here they are numbered first.
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
    trained = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    trained.decoder = decoders.WordPiece(prefix="##")
    trained.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return BertTokenizerFast(tokenizer_object=trained, do_lower_case=do_lower_case)


def load_tokenizer(name_or_path: str, vocab_size: int) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub.

    Raises:
        UsageError: it cannot be loaded, lacks [CLS], [SEP], [MASK] or [PAD], or has more than `vocab_size` entries.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(
            f"tokenizer {name_or_path} cannot be loaded ({reason}): check the name or the folder"
        ) from None
    missing = [
        name for name in ("cls_token", "sep_token", "mask_token", "pad_token") if getattr(tokenizer, name) is None
    ]
    if missing:
        raise UsageError(
            f"tokenizer {name_or_path} has no {', '.join(missing)}: BERT pretraining needs a BERT-like tokenizer"
        )
    if len(tokenizer) > vocab_size:
        raise UsageError(
            f"vocab_size is {vocab_size}, but tokenizer {name_or_path} has {len(tokenizer)} entries: set --vocab_size to "
            f"{len(tokenizer)} or more"
        )
    return tokenizer
