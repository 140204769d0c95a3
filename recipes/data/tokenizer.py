"""WordPiece tokenizers: trained on the corpus, or loaded."""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import datasets
import tokenizers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerBase

from recipes.errors import UsageError

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
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=do_lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return BertTokenizerFast(tokenizer_object=tokenizer, do_lower_case=do_lower_case)


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
