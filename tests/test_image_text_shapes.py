"""Models of pictures and texts beside transformers' own, on no device: parameters, patches of pictures, work and memory."""

import json
import random
from functools import partial

import pytest
import torch
import transformers
from cases import thorough
from transformers import AutoConfig, AutoModelForImageTextToText

from samestep._internals import torch_tracing, transformers_models
from samestep._internals.torch_tracing import imitate_cuda
from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.step import optim
from samestep.step.losses import linear_cross_entropy
from stepplan.decoder import Tuning
from stepplan.image_text import count_patches, model_from_config
from stepplan.memory import count_trained, planned_memory
from stepplan.timing import count_work
from stepplan.trace import USUAL_HYPERPARAMETERS, trace_step

TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"intermediate_size": 96, "vocab_size": 128, "head_dim": 16, "max_position_embeddings": 4096}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
ROTATED = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
TOWER = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
TOWER |= {"image_size": 56, "patch_size": 14}
QWEN = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
CLIP, SIGLIP = TOWER | {"model_type": "clip_vision_model"}, TOWER | {"model_type": "siglip_vision_model"}
LLAMA = TEXT | {"model_type": "llama"}
CASES = {
    "llava": {"vision_config": CLIP, "text_config": LLAMA},
    "llava with another tower": {"vision_config": SIGLIP | {"vision_use_head": False}, "text_config": LLAMA},
    "gemma3": {
        "vision_config": SIGLIP,
        "text_config": TEXT | {"model_type": "gemma3_text"},
        "mm_tokens_per_image": 4,
    },
    "idefics3": {"vision_config": TOWER, "text_config": LLAMA, "scale_factor": 2},
    "smolvlm": {"vision_config": TOWER, "text_config": LLAMA, "scale_factor": 4, "tie_word_embeddings": True},
    "internvl": {
        "vision_config": TOWER | {"image_size": [56, 56], "patch_size": [14, 14]},
        "text_config": TEXT | {"model_type": "qwen2"},
    },
    "qwen2_vl": {
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        "text_config": ROTATED | {"model_type": "qwen2_vl_text"},
    },
    "qwen2_5_vl": {
        "vision_config": QWEN | {"fullatt_block_indexes": [2]},
        "text_config": ROTATED | {"model_type": "qwen2_5_vl_text"},
    },
    "qwen3_vl": {
        "vision_config": QWEN | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
        "text_config": ROTATED | {"model_type": "qwen3_vl_text"},
    },
}
SMALL_PICTURES = {"idefics3": {"longest_edge": 112}, "smolvlm": {"longest_edge": 112}}


def make(case: str):
    """Make the configuration of a case, and its fields."""
    config = AutoConfig.for_model(case.split()[0], **CASES[case])
    return config, json.loads(config.to_json_string(use_diff=False))


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case):
    config, values = make(case)
    with torch.device("meta"):
        real = AutoModelForImageTextToText.from_config(config)
    model = model_from_config(values, [(112, 112)], 32, name="it", processor=SMALL_PICTURES.get(case))
    assert model.num_parameters == real.num_parameters()
    assert model.sequence_length == 32 + model.image_tokens


def test_patches_are_those_of_the_processors():
    """Of 60 sizes: what the processors of transformers say, which need no model."""
    draw = random.Random(1)
    sizes = [(draw.randint(60, 2000), draw.randint(60, 2000)) for _ in range(60)]
    vision = {"patch_size": 14, "spatial_merge_size": 2}
    qwen = transformers.Qwen2VLImageProcessor()
    for kind in ("qwen2_vl", "qwen2_5_vl"):
        for size in sizes:
            picture = count_patches({"model_type": kind, "vision_config": vision}, *size)
            assert picture.patches == qwen.get_number_of_image_patches(*size) == 4 * picture.tokens
    cut = transformers.Idefics3ImageProcessor()
    config = {"model_type": "idefics3", "vision_config": {"patch_size": 14, "image_size": 364}, "scale_factor": 2}
    for size in sizes:
        picture = count_patches(config, *size)
        assert picture.tiles == cut.get_number_of_image_patches(*size, {})[0]
        assert picture.tokens == 169 * picture.tiles
    tiled = transformers.GotOcr2ImageProcessor(crop_to_patches=True)
    config = {"model_type": "internvl", "vision_config": {"patch_size": 14, "image_size": 384}}
    for size in sizes:
        tiles = tiled.get_number_of_image_patches(*size, {"crop_to_patches": True})
        assert count_patches(config, *size).tiles == tiles


@pytest.mark.parametrize("is_trained", [False, thorough(True)])
def test_memory_and_work_meet_the_trace(is_trained):
    """A LLaVA as a script would compute it: features in the places of the picture, a head in chunks."""
    tower, text = CLIP | {"hidden_size": 128, "intermediate_size": 512, "image_size": 112}, LLAMA | {"hidden_size": 128}
    text |= {"intermediate_size": 512, "vocab_size": 1000, "num_key_value_heads": 4, "head_dim": 32}
    more = {"vision_config": tower, "text_config": text, "vision_feature_layer": -1}
    config = AutoConfig.for_model("llava", **more)
    values = json.loads(config.to_json_string(use_diff=False))
    planned = model_from_config(values, [(112, 112)], 32, name="it", trains_tower=is_trained)

    def build():
        with transformers_models.skip_weight_initialization():
            model = AutoModelForImageTextToText.from_config(config)
        model.model.vision_tower.requires_grad_(is_trained)
        return model

    def loss(model, num_samples):
        ids = torch.zeros(num_samples, planned.sequence_length, dtype=torch.int64)
        states = model.model.vision_tower(pixel_values=torch.zeros(num_samples, 3, 112, 112)).last_hidden_state
        features, inner = model.model.multi_modal_projector(states[:, 1:]), model.model.language_model
        embedded = inner.get_input_embeddings()(ids)
        is_picture = torch.zeros(*ids.shape, 1, dtype=torch.bool).expand_as(embedded)
        embedded = embedded.masked_scatter(is_picture, features.to(embedded.dtype))
        hidden = inner(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return linear_cross_entropy(hidden.flatten(0, 1), model.lm_head.weight, ids.flatten())[0]

    layout = solve_layout(num_processes=1, global_batch_size=8, per_device_train_batch_size=8)
    for mixed_precision in ("no", "bf16"):
        with imitate_cuda(), torch_tracing.silence_log(), transformers_models.assume_single_document():
            traced = trace_step(
                build,
                loss,
                8,
                mixed_precision=mixed_precision,
                gradient_checkpointing=False,
                make_optimizer=partial(optim.adamw, hyperparameters=USUAL_HYPERPARAMETERS, weight_decay=0.0),
            )
        memory = planned_memory(planned, layout, mixed_precision=mixed_precision)
        assert memory.total == pytest.approx(traced.peak, rel=0.06), mixed_precision
        assert 8 * planned.flops_per_sample == pytest.approx(traced.flops, rel=0.03)


def test_what_is_trained_is_counted():
    """Adapters on the text alone, on both; a frozen tower saves nothing and has no gradient."""
    _, values = make("qwen2_5_vl")
    make_model = partial(model_from_config, values, [(112, 112), (56, 112)], 32, name="it")
    whole, frozen = make_model(trains_tower=True), make_model()
    assert count_trained(whole) == whole.num_parameters
    assert count_trained(whole) - count_trained(frozen) == whole.tower.num_base
    assert frozen.tower.saved_bytes(autocast=True) == 0 < whole.tower.saved_bytes(autocast=True)
    assert count_work(frozen, "bf16").flops < count_work(whole, "bf16").flops
    method = Tuning(rank=4, targets=("q_proj", "v_proj"), matrix_bytes=2)
    adapted = make_model(method=method, trains_bridge=False)
    assert count_trained(adapted) == adapted.num_adapter == 2 * 4 * (64 + 64 + 64 + 32)
    assert adapted.weight_bytes < whole.weight_bytes
    peaks = [max(map(sum, model.peaks(2, autocast=True, gradient_checkpointing=False))) for model in (whole, frozen)]
    assert peaks[0] > peaks[1]


def test_mistakes_get_one_line():
    _, values = make("llava")
    with pytest.raises(UsageError, match="has 4,096 positions, but a sample has 4,116 tokens, 16 of them of pictures"):
        model_from_config(values, [(56, 56)], 4100, name="it")
    with pytest.raises(UsageError, match="of models of pictures and texts llava, gemma3"):
        count_patches({"model_type": "bert"}, 8, 8)
    del values["vision_config"]["intermediate_size"]
    with pytest.raises(UsageError, match="its configuration has no intermediate_size"):
        model_from_config(values, [(56, 56)], 8, name="it")
