"""Makes tiny models of transformers for one task of each kind, with drawn data and the collate function of its examples.

The examples' own preprocessing of texts, images and sounds is left out: data are what it would give.
"""

import torch
from setup import NUM_SAMPLES, SIZES, bert, texts, tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
    default_data_collator,
)

words = tokenizer()
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
LAYERS = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
LAYERS |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": SIZES["vocab_size"]}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw_from)


def draw_classes(number: int, *shape: int) -> torch.Tensor:
    return torch.randint(number, shape, generator=draw_from)


draw_from = torch.Generator().manual_seed(1)
tokens = [words(text)["input_ids"] for text in texts(1)]


def translate(model):
    """T5 and BART: run_summarization, run_translation."""
    data = [
        {"input_ids": source, "attention_mask": [1] * len(source), "labels": target}
        for source, target in zip(tokens, [words(text)["input_ids"] for text in texts(2)], strict=True)
    ]
    return model, data, DataCollatorForSeq2Seq(words, model=model)


def t5():
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    return translate(
        T5ForConditionalGeneration(
            T5Config(vocab_size=SIZES["vocab_size"], **sizes, pad_token_id=0, decoder_start_token_id=0, eos_token_id=2)
        )
    )


def bart():
    return translate(
        BartForConditionalGeneration(BartConfig(**LAYERS, **NO_DROPOUT, **SPECIAL, max_position_embeddings=64))
    )


def whisper():
    """run_speech_recognition_seq2seq, with its collator's padding."""
    model = WhisperForConditionalGeneration(
        WhisperConfig(
            **LAYERS, **NO_DROPOUT, **SPECIAL, num_mel_bins=8, max_source_positions=16, max_target_positions=64
        )
    )
    data = [{"input_features": draw(8, 32), "labels": torch.tensor(ids)} for ids in tokens]

    def collate(samples):
        labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
        return {"input_features": torch.stack([sample["input_features"] for sample in samples]), "labels": labels}

    return model, data, collate


def ner():
    data = [{"input_ids": ids, "labels": [token % 5 for token in ids]} for ids in tokens]
    return bert(BertForTokenClassification, num_labels=5), data, DataCollatorForTokenClassification(words)


def qa():
    data = [
        dict(words(text)) | {"start_positions": number % 2, "end_positions": 1} for number, text in enumerate(texts(1))
    ]
    return bert(BertForQuestionAnswering), data, DataCollatorWithPadding(words)


def swag():
    data = [{"input_ids": [tokens[number], tokens[number - 1]], "label": number % 2} for number in range(NUM_SAMPLES)]
    for sample in data:
        sample["attention_mask"] = [[1] * len(ids) for ids in sample["input_ids"]]
    return bert(BertForMultipleChoice), data, DataCollatorForMultipleChoice(words)


def image_classification():
    model = ViTForImageClassification(
        ViTConfig(**VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)
    )
    return (
        model,
        [{"pixel_values": draw(3, 16, 16), "labels": n % 3} for n in range(NUM_SAMPLES)],
        default_data_collator,
    )


def mim():
    """run_mim: half the patches are masked, in the dataset."""
    model = ViTForMaskedImageModeling(
        ViTConfig(**VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, encoder_stride=4)
    )
    data = [{"pixel_values": draw(3, 16, 16), "bool_masked_pos": draw(16) > 0} for _ in range(NUM_SAMPLES)]
    return model, data, default_data_collator


def segmentation():
    """run_semantic_segmentation: some pixels are of no class."""
    sizes = {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [1, 1], "hidden_sizes": [8, 16], "strides": [2, 2]}
    sizes |= {"patch_sizes": [3, 3], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
    no_dropout = {"drop_path_rate": 0.0, "classifier_dropout_prob": 0.0}
    model = SegformerForSemanticSegmentation(
        SegformerConfig(**sizes, **no_dropout, num_labels=3, semantic_loss_ignore_index=255)
    )
    data = []
    for number in range(NUM_SAMPLES):
        labels = draw_classes(3, 16, 16)
        labels[: number % 8] = 255
        data.append({"pixel_values": draw(3, 16, 16), "labels": labels})
    return model, data, default_data_collator


def ctc(reduction="sum"):
    """run_speech_recognition_ctc: the model's loss is its default, a sum (ctc_loss_reduction)."""
    sizes = SIZES | {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 4}
    sizes |= {"num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "feat_extract_norm": "layer"}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}
    no_dropout |= {"feat_proj_dropout": 0.0, "final_dropout": 0.0, "apply_spec_augment": False}
    model = Wav2Vec2ForCTC(
        Wav2Vec2Config(
            **{name: size for name, size in sizes.items() if name != "max_position_embeddings"},
            **no_dropout,
            pad_token_id=0,
            do_stable_layer_norm=True,
            ctc_zero_infinity=True,
            ctc_loss_reduction=reduction,
        )
    )
    data = [{"input_values": draw(400), "labels": torch.tensor(ids)} for ids in tokens]

    def collate(samples):
        labels = pad_sequence([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
        return {"input_values": torch.stack([sample["input_values"] for sample in samples]), "labels": labels}

    return model, data, collate


def moe():
    """run_clm with a mixture of experts and its balance loss."""
    model = MixtralForCausalLM(
        MixtralConfig(
            **SIZES,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.02,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return model, [{"input_ids": ids} for ids in tokens], DataCollatorForLanguageModeling(words, mlm=False)


def gpt2():
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=SIZES["vocab_size"],
            n_positions=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    return model, [{"input_ids": ids} for ids in tokens], DataCollatorForLanguageModeling(words, mlm=False)


def llava():
    """LLaVA: an image of 16 patches in front of every text, whose places are not predicted."""
    image = SIZES["vocab_size"]
    text = LlamaConfig(**SIZES | {"vocab_size": image + 1}, num_key_value_heads=2, pad_token_id=0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION, projection_dim=32),
            text_config=text,
            image_token_id=image,
            vision_feature_select_strategy="default",
            vision_feature_layer=-1,
        )
    )
    data = [{"ids": torch.tensor([1] + [image] * 16 + ids), "pixels": draw(3, 16, 16)} for ids in tokens]

    def collate(samples):
        ids = pad_sequence([sample["ids"] for sample in samples], batch_first=True)
        labels = ids.masked_fill((ids == 0) | (ids == image), -100)
        pixels = torch.stack([sample["pixels"] for sample in samples])
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels, "pixel_values": pixels}

    return model, data, collate


def clip():
    """run_clip: images and texts that are compared within the micro-batch."""
    text = SIZES | {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=32))
    length = max(map(len, tokens))
    data = []
    for ids in tokens:
        mask = [1] * len(ids) + [0] * (length - len(ids))
        data.append({"input_ids": ids + [2] * (length - len(ids)), "attention_mask": mask})
        data[-1] |= {"pixel_values": draw(3, 16, 16), "return_loss": True}

    def collate(samples):
        batch = {
            name: torch.stack([torch.as_tensor(sample[name]) for sample in samples])
            for name in ("input_ids", "attention_mask", "pixel_values")
        }
        return batch | {"return_loss": True}

    return model, data, collate


TASKS = {
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "ner": ner,
    "qa": qa,
    "swag": swag,
    "image_classification": image_classification,
    "mim": mim,
    "segmentation": segmentation,
    "ctc": ctc,
    "ctc_mean": lambda: ctc("mean"),
    "moe": moe,
    "gpt2": gpt2,
    "llava": llava,
    "clip": clip,
}


def build(name: str):
    """Make the model, the data and the collate function of a task."""
    torch.manual_seed(0)
    return TASKS[name]()
