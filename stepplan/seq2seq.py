"""Shapes of sequence-to-sequence models from a configuration: T5's family, BART's, and Whisper."""

from collections.abc import Callable, Mapping
from typing import Any

from stepplan.stacks import EncoderDecoder, Stack

Config = Mapping[str, Any]
T5_NAMES = ("q", "k", "v", "o", "wi", "wo", "wi_1")
GATED_NAMES = ("q", "k", "v", "o", "wi_0", "wo", "wi_1")


def t5(config: Config, source_length: int, target_length: int) -> EncoderDecoder:
    """Return the shape of a T5, mT5 or UMT5, whose attention has a bias of distances, so that scores are stored.

    The bias belongs to the first layer of each stack, in UMT5 to every layer.
    """
    h, heads = config["d_model"], config["num_heads"]
    kind = config.get("feed_forward_proj", "relu" if config["model_type"] == "t5" else "gated-gelu")
    activation, is_gated = kind.rpartition("-")[2], kind.startswith("gated")
    dropout = config.get("dropout_rate", 0.1) > 0
    biases = config.get("relative_attention_num_buckets", 32) * heads
    is_in_all = config["model_type"] == "umt5"
    fields: dict[str, Any] = {
        "hidden_size": h,
        "intermediate_size": config["d_ff"],
        "num_heads": heads,
        "head_dim": config["d_kv"],
        "is_gated": is_gated,
        "activation": "gelu_new" if kind == "gated-gelu" else activation,
        "has_rms": True,
        **dict.fromkeys(("has_query_bias", "has_key_bias", "has_biases"), False),
        **dict.fromkeys(("dropouts", "activation_dropout", "attention_dropout"), dropout),
        "has_score_bias": True,
        "num_outside": h + biases * (not is_in_all),
        "extra_layer": biases * is_in_all,
        "names": GATED_NAMES if is_gated else T5_NAMES,
    }
    encoder = Stack(num_layers=config["num_layers"], tokens=source_length, **fields)
    layers = config.get("num_decoder_layers") or config["num_layers"]
    decoder = Stack(num_layers=layers, tokens=target_length, source_tokens=source_length, **fields)
    return EncoderDecoder(
        encoder=encoder, decoder=decoder, vocab_size=config["vocab_size"], num_head=config["vocab_size"] * h
    )


def _bart_stack(config: Config, name: str, tokens: int, source_tokens: int, **more: Any) -> Stack:
    """Return the encoder or the decoder of a model of BART's kind."""
    h, heads = config["d_model"], config[f"{name}_attention_heads"]
    return Stack(
        hidden_size=h,
        num_layers=config[f"{name}_layers"],
        intermediate_size=config[f"{name}_ffn_dim"],
        num_heads=heads,
        head_dim=h // heads,
        tokens=tokens,
        source_tokens=source_tokens,
        activation=config.get("activation_function", "gelu"),
        dropouts=config.get("dropout", 0.1) > 0,
        activation_dropout=config.get("activation_dropout", 0.0) > 0,
        attention_dropout=config.get("attention_dropout", 0.0) > 0,
        **more,
    )


def bart(config: Config, source_length: int, target_length: int) -> EncoderDecoder:
    """Return the shape of a BART, mBART, Pegasus, Marian, M2M-100 or NLLB.

    They differ in positions, which are learned (BART's and mBART's have two more), parameters that are not trained (Pegasus,
    Marian) or none (M2M-100), and in normalisations behind the embedding and behind the last layer.
    """
    kind, h = config["model_type"], config["d_model"]
    positions = 0 if kind == "m2m_100" else config["max_position_embeddings"] + 2 * (kind in ("bart", "mbart"))
    norms = {"bart": 1, "mbart": 2, "pegasus": 1, "m2m_100": 1, "marian": 0}[kind]
    outside = positions * h + norms * 2 * h
    encoder = _bart_stack(config, "encoder", source_length, 0, num_outside=outside)
    decoder = _bart_stack(config, "decoder", target_length, source_length, num_outside=outside)
    vocab = config["vocab_size"]
    is_tied = config.get("tie_word_embeddings", True)
    num_head = vocab * h * (1 if is_tied else 2)
    return EncoderDecoder(encoder=encoder, decoder=decoder, vocab_size=vocab, num_head=num_head)


def whisper(config: Config, source_length: int, target_length: int) -> EncoderDecoder:
    """Return the shape of a Whisper: two convolutions over frames, the second of which halves them.

    Args:
        config: as of `transformers.WhisperConfig`.
        source_length: not read: every sound is padded to all positions of the encoder, 1,500 for 30 seconds.
        target_length: tokens of the text.
    """
    h, mels, positions = config["d_model"], config["num_mel_bins"], config["max_source_positions"]
    stem = 3 * mels * h + h + 3 * h * h + h
    flops = 2 * (2 * positions * 3 * mels * h + positions * 3 * h * h)
    # Both convolutions' outputs before and after their activations, of which the first have twice the positions
    saved = positions * h * (2 * 4 + 2 * 4 + 4), positions * h * (2 * 2 + 2 * 2 + 2)
    outside = {"has_key_bias": False}
    encoder = _bart_stack(
        config,
        "encoder",
        positions,
        0,
        num_outside=stem + positions * h + 2 * h,
        outside_flops=flops,
        input_flops=2 * 2 * positions * 3 * mels * h,
        outside_bytes=saved,
        **outside,
    )
    own = config["max_target_positions"] * h + 2 * h
    decoder = _bart_stack(config, "decoder", target_length, positions, num_outside=own, **outside)
    return EncoderDecoder(
        encoder=encoder, decoder=decoder, vocab_size=config["vocab_size"], num_head=config["vocab_size"] * h
    )


KINDS: dict[str, Callable[[Config, int, int], EncoderDecoder]] = {
    **dict.fromkeys(("t5", "mt5", "umt5"), t5),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100"), bart),
    "whisper": whisper,
}
"""`model_type` -> its shape."""
UNLIMITED = ("t5", "mt5", "umt5")
"""Values of `model_type` without a limit of positions."""
