"""Drawn utterances and pictures, and the tiny models that scripts of this folder train on them."""

import torch
from torch.utils.data import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

VOCAB, EOS, IMAGE = 40, 2, 3


class Utterances(Dataset):
    """Log-mel frames of an utterance, and its tokens."""

    def __init__(self, seed, n=80):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            frames = int(torch.randint(20, 60, (), generator=g))
            words = int(torch.randint(2, 9, (), generator=g))
            mel = torch.randn(8, frames, generator=g, dtype=torch.float64)
            self.rows.append((mel, torch.randint(6, VOCAB, (words,), generator=g)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def whisper(**more):
    """A Whisper in float64, of 30 encoder positions (60 frames)."""
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=VOCAB,
            num_mel_bins=8,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_source_positions=30,
            max_target_positions=20,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=2,
            decoder_start_token_id=1,
            use_cache=False,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **more,
        )
    ).double()


class Questions(Dataset):
    """A picture, a question of some words, an answer of some words."""

    def __init__(self, seed, n=80):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):

            def words(a, z):
                return torch.randint(4, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

            self.rows.append((torch.randn(3, 8, 8, generator=g, dtype=torch.float64), words(2, 9), words(1, 8)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def llava():
    """A LLaVA in float64, with 4 places for a picture."""
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=8,
                patch_size=4,
            ),
            text_config=LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=16,
                intermediate_size=24,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                max_position_embeddings=64,
                use_cache=False,
                pad_token_id=0,
            ),
            image_token_id=IMAGE,
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
        )
    ).double()


def translations(seed, n=80):
    """Pairs of a source of 3 to 13 words and a target of 2 to 9."""
    g = torch.Generator().manual_seed(seed)

    def draw(a, z):
        return torch.randint(4, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

    return [(draw(3, 14), draw(2, 10)) for _ in range(n)]


def bart():
    """A BART in float64, as mBART and NLLB are."""
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=40,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            pad_token_id=1,
            bos_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=2,
            use_cache=False,
        )
    ).double()


def t5():
    """A T5 in float64."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            use_cache=False,
        )
    ).double()


class Pictures(Dataset):
    """One to four tiles of a picture, and its caption."""

    def __init__(self, seed, n=80):
        g = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            tiles = int(torch.randint(1, 5, (), generator=g))
            words = int(torch.randint(2, 9, (), generator=g))
            self.rows.append(
                (
                    torch.randn(tiles, 3, 8, 8, generator=g, dtype=torch.float64),
                    torch.randint(3, VOCAB, (words,), generator=g),
                )
            )

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]
