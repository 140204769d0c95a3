"""Sequences end to end in one row are computed as transformers computes each of them alone, by any causal language model."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import keep
from common import TRANSFORMERS, fresh_accelerator
from hooks import Watch
from torch import nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM
from wide import Wide

from samestep._internals.torch_tracing import FakeTensorMode
from samestep.errors import UsageError
from samestep.models import adapters, packing, quantization, sequences
from samestep.models.causal_lm import CausalLmSums, build_model
from samestep.models.saved_causal_lm import merge_adapter
from samestep.recipe import catalog as recipes
from samestep.recipe.run_settings import RunSettings
from samestep.step import losses
from samestep.step.noise import Dropout, noise_by_sample
from samestep.training import checkpoint, launch
from samestep.training.reduction import Reduction

SHAPE = {
    **{"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "max_position_embeddings": 64, "head_dim": 8, "initializer_range": 0.1},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR_ATTENTION = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
EXACT = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 4},
    "mixtral": EXPERTS | {"sliding_window": 3},
    "gemma": {"num_key_value_heads": 1},
    "gemma2": {"sliding_window": 4, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {},
    "gpt2": {},
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.2},
    "olmo2": {},
    "starcoder2": {"sliding_window": 5},
    "cohere": {"logit_scale": 0.3},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_oss": EXPERTS | {"sliding_window": 4},  # sinks
}
"""Architectures whose sequences lie end to end -> fields beside `SHAPE`."""
PADDED = {
    "gptj": {"rotary_dim": 4},
    "falcon": {"head_dim": ...},
    "bloom": {"n_head": 4},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "qwen3_next": EXPERTS | LINEAR_ATTENTION | {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
"""Architectures whose sequences are padded."""
LEAKS_ALONE = {"gpt_oss", "opt", "falcon", "mamba2", "qwen3_next", "bloom", "lfm2"}
"""Architectures that leak with transformers' own kernels, position_ids restarting, as they were found to do."""
if TRANSFORMERS >= (5, 24):  # GPT-J's attention can be exchanged, Falcon keeps sequences apart
    EXACT["gptj"] = PADDED.pop("gptj")
    LEAKS_ALONE.remove("falcon")
LENGTHS = (7, 1, 12, 3, 12, 5)
pytestmark = pytest.mark.usefixtures("tables_cost_nothing")


def make_model(architecture: str, **changes) -> nn.Module:
    torch.manual_seed(0)
    fields = SHAPE | (EXACT | PADDED)[architecture] | changes
    fields = {name: value for name, value in fields.items() if value is not ...}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **fields)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=0.5)
    return model


def make_samples(lengths=LENGTHS, seed=1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids and whether each is trained, never a sequence's first one; of the second sample none is."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in lengths:
        is_trained = torch.rand(length, generator=generator) < 0.7
        is_trained[0] = False
        samples.append((torch.randint(61, (length,), generator=generator), is_trained))
    return samples


def collate(samples) -> dict[str, torch.Tensor]:
    """The micro-batch of these samples, as the data makes it."""
    lengths = [len(tokens) for tokens, _ in samples]
    ends = torch.tensor([0, *lengths]).cumsum(0)
    trained = torch.cat([is_trained for _, is_trained in samples]).nonzero()[:, 0]
    tokens = torch.cat([tokens for tokens, _ in samples])
    return {
        "input_ids": tokens[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "ends": ends.int(),
        "labels": tokens[trained],
        "label_index": trained - 1,
        "label_sequence": torch.searchsorted(ends[1:], trained, right=True),
    }


def loss_alone(model, tokens, is_trained, length=None) -> torch.Tensor:
    """Transformers' own loss of a sample, padded at its end to a length: summed over the trained tokens."""
    num_padding = 0 if length is None else length - len(tokens)
    input_ids = F.pad(tokens, (0, num_padding))[None]
    mask = F.pad(torch.ones_like(tokens), (0, num_padding))[None]
    logits = model(input_ids=input_ids, attention_mask=mask if num_padding else None, use_cache=False).logits[0]
    labels = torch.where(is_trained, tokens, -100)[1:]
    return F.cross_entropy(logits[: len(labels)], labels, ignore_index=-100, reduction="sum")


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


# ---------------------------------------------------------------------------------------------------------------------
# Against transformers


@pytest.mark.parametrize("architecture", EXACT | PADDED)
def test_row_is_its_sequences_alone(architecture):
    model = make_model(architecture)
    samples = make_samples()
    own = copy.deepcopy(model)
    own.set_attn_implementation("eager")  # transformers 5.17 lets sdpa compute Gemma 2's, without its soft cap
    losses = [loss_alone(own, *sample) for sample in samples]
    sum(losses).backward()
    sums = CausalLmSums(model)
    assert sums.is_padded == (architecture in PADDED) == any("a padded row of its own" in note for note in sums.notes)
    kernels = ["padded"] if sums.is_padded else ["eager", "sdpa"] if model._supports_sdpa else ["eager"]
    for kernel in kernels:
        if not sums.is_padded:
            model.set_attn_implementation(sequences.PREFIX + kernel)
        model.zero_grad()
        (loss_sum, *_), _ = sums(**collate(samples))
        loss_sum.backward()
        assert loss_sum.item() == pytest.approx(sum(losses).item(), rel=1e-5)
        assert distance(gradients(model), gradients(own)) < 1e-5
        with torch.no_grad():
            batch = collate(samples)
            hidden = sums.hidden(batch["input_ids"], batch["position_ids"], batch["ends"])
            logits = [own(input_ids=tokens[None], use_cache=False).logits[0] for tokens, _ in samples]
            log_p = torch.cat(logits).float().log_softmax(-1).gather(1, batch["input_ids"].T)[:, 0]
            found = torch.cat([part[1] for part in sums._log_probabilities(hidden, batch["input_ids"][0])])
            assert distance(found, log_p) < 1e-5


@pytest.mark.parametrize("architecture", ["mistral", "llama", "gemma2"])
def test_kernel_of_any_length_is_called_as_documented(architecture, monkeypatch):
    """On the device of tests there is no such kernel: one that follows its documentation stands for it."""
    num_calls = []

    def varlen_attn(q, k, v, q_ends, k_ends, q_longest, k_longest, *, scale, window_size, enable_gqa):
        assert q_ends.dtype == torch.int32
        assert q_ends[-1] == len(q)
        assert q_ends.diff().max() == q_longest == k_longest
        assert enable_gqa == (q.shape[1] != k.shape[1])
        num_calls.append(1)
        outputs = []
        for first, end in itertools.pairwise(q_ends.tolist()):
            query, key, value = (x[first:end].transpose(0, 1) for x in (q, k, v))
            gap = torch.arange(end - first)[:, None] - torch.arange(end - first)
            is_seen = (gap >= 0) & (gap <= (end if window_size[0] < 0 else window_size[0]))
            y = F.scaled_dot_product_attention(query, key, value, is_seen, scale=scale, enable_gqa=enable_gqa)
            outputs.append(y.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr(sequences, "varlen_attn", varlen_attn)
    sums, batch = CausalLmSums(make_model(architecture)), collate(make_samples())
    expected = sums(**batch)[0]
    sums.causal_lm.set_attn_implementation(sequences.PREFIX + "varlen")
    assert distance(sums(**batch)[0], expected) < 1e-6
    assert len(num_calls) == (0 if architecture == "gemma2" else 2)  # Gemma 2 has a soft cap


@pytest.mark.parametrize("architecture", EXACT | PADDED)
def test_probe_flags_models_that_leak(architecture):
    model = make_model(
        architecture, **({"sliding_window": 64} if "sliding_window" in EXACT.get(architecture, {}) else {})
    )
    model.set_attn_implementation("eager")
    assert (packing.probe(model) is not None) == (architecture in LEAKS_ALONE)


def test_probe_leaves_the_model_as_it_was():
    model = make_model("llama").train()
    state, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    packing.probe(model)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), noise)


def test_padded_path_is_the_row(monkeypatch):
    sums, samples = CausalLmSums(make_model("qwen3")), make_samples()
    row = sums(**collate(samples))[0]
    with sums.own_attention():
        sums.is_padded = True
        assert distance(sums(**collate(samples))[0], row) < 1e-6


# ---------------------------------------------------------------------------------------------------------------------
# Against an independent training


def recipe(**changes) -> SimpleNamespace:
    values = {
        **{"objective": "sft", "loss_weighting": "token", "architecture": "llama", "model_name_or_path": None},
        **{
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
        **{
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
        },
        **{
            "base_quantization": None,
            "lora_rank": None,
            "lora_alpha": None,
            "lora_dropout": 0.0,
            "lora_targets": ("all-linear",),
            "use_rslora": False,
        },
        **{"use_dora": False, "modules_to_save": None, "max_seq_length": 12, "images": False},
        **{"preference_beta": 0.5, "preference_margin": 0.3},
    }
    terms = {"sft": ["lm"], "dpo": ["preference", "sft"], "orpo": ["sft", "odds"]}
    values |= changes
    values["loss_weights"] = dict.fromkeys(terms.get(values["objective"], ["preference"]), 1.0)
    return SimpleNamespace(**values)


ORACLE_SHAPES = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {},
    "gpt2": {"num_key_value_heads": None},
}
LR, STEPS = 0.01, 5


def steps_of_samples() -> list[list]:
    """Five steps of six samples."""
    return [make_samples(LENGTHS[shift:] + LENGTHS[:shift], seed=shift) for shift in range(STEPS)]


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def train_ours(sums: CausalLmSums, by_sample: bool) -> list[float]:
    """Train on micro-batches of 3, 1 and 2 samples; the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in sums.parameters() if p.requires_grad], lr=LR, weight_decay=0.1)
    step_losses = []
    for samples in steps_of_samples():
        loss = 0.0
        count = len(samples) if by_sample else sum(int(is_trained.sum()) for _, is_trained in samples)
        for part in (samples[:3], samples[3:4], samples[4:]):
            (loss_sum, *_), _ = sums(**collate(part))
            (loss_sum / count).backward()
            loss += loss_sum.item() / count
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(loss)
    return step_losses


def train_alone(call, parameters: list[torch.Tensor], by_sample: bool) -> list[float]:
    """Train with plain PyTorch: one padded sample at a time, all logits, the mean over the step's tokens or samples."""
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)
    step_losses = []
    for samples in steps_of_samples():
        terms = []
        for tokens, is_trained in samples:
            loss = loss_alone(call, tokens, is_trained, length=14)
            terms.append(loss / max(1, int(is_trained.sum())) if by_sample else loss)
        total = sum(terms) / (len(samples) if by_sample else sum(int(is_trained.sum()) for _, is_trained in samples))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        step_losses.append(total.item())
    return step_losses


@pytest.mark.parametrize("tunes", ["full", "lora"])
@pytest.mark.parametrize("weighting", ["token", "sample"])
@pytest.mark.parametrize("architecture", keep(ORACLE_SHAPES, ["llama", "gemma3_text"]))
def test_training_is_that_of_plain_pytorch(architecture, weighting, tunes):
    options = {"architecture": architecture, "loss_weighting": weighting} | ORACLE_SHAPES[architecture]
    by_sample = weighting == "sample"
    torch.manual_seed(0)
    plain = without_dropout(build_model(recipe(**options))).double()
    torch.manual_seed(0)
    lora = {"lora_rank": 3, "lora_alpha": 5} if tunes == "lora" else {}
    sums = without_dropout(CausalLmSums.from_recipe(recipe(**options, **lora), None)).double()
    with Wide():
        if tunes == "full":
            expected = train_alone(plain, list(plain.parameters()), by_sample)
            trained = dict(plain.named_parameters())
            ours = dict(sums.model.named_parameters())
        else:
            # W + s B A, of parameters that are nobody's modules
            adapted = {
                name: [
                    module.lora_A["default"].weight.detach().clone(),
                    module.lora_B["default"].weight.detach().clone(),
                ]
                for name, module in sums.causal_lm.named_modules()
                if hasattr(module, "lora_A")
            }
            leaves = {(name, k): pair[k].requires_grad_() for name, pair in adapted.items() for k in (0, 1)}
            weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}

            def call(**inputs):
                changed = {}
                for name, (a, b) in adapted.items():
                    delta = (5 / 3) * b @ a
                    changed[f"{name}.weight"] = weights[f"{name}.weight"] + (
                        delta.T if architecture == "gpt2" else delta
                    )
                return functional_call(plain, weights | changed, kwargs=inputs)

            expected = train_alone(call, list(leaves.values()), by_sample)
            trained = {f"{name}.lora_{'AB'[k]}.default.weight": leaf for (name, k), leaf in leaves.items()}
            ours = {name: p for name, p in sums.causal_lm.named_parameters() if p.requires_grad}
            assert len(ours) == len(trained) >= 2 * 2 * 4
        losses = train_ours(sums, by_sample)
    assert losses == pytest.approx(expected, abs=1e-10)
    assert ours.keys() == trained.keys()
    for name, parameter in trained.items():
        assert (ours[name] - parameter).abs().max() < 1e-10, name
    assert len(set(losses)) == STEPS


# ---------------------------------------------------------------------------------------------------------------------
# Pairs


@pytest.mark.parametrize("objective", ["dpo", "orpo", "simpo", "reward"])
@pytest.mark.parametrize("options", [{"architecture": "llama"}, {"architecture": "gemma2"}, {"lora_rank": 2}])
def test_pairs_in_a_row_are_their_sequences_alone(options, objective):
    torch.manual_seed(0)
    options = recipe(objective=objective, **options)
    sums = CausalLmSums.from_recipe(options, None).eval()
    for name, parameter in sums.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    samples, reference = make_samples(), torch.linspace(-9, 9, 6)
    total, correct = 0, 0
    for first, end in ((0, 4), (4, 6)):
        part, right = sums(**collate(samples[first:end]), reference=reference[first:end])
        total, correct = total + part, correct + right
    total.sum().backward()
    gradient = gradients(sums)
    sums.zero_grad()
    with sums.own_attention() as own:
        if objective == "reward":
            values = [own(input_ids=tokens[None], use_cache=False).logits[0, 0] for tokens, _ in samples]
        else:
            values = [-loss_alone(own, *sample) for sample in samples]
        num_tokens = torch.tensor([int(is_trained.sum()) for _, is_trained in samples])
        from samestep.contrib import preferences  # here: a room that may be missing

        expected, expected_correct, _ = preferences.sum_terms(
            objective, list(options.loss_weights), torch.stack(values), num_tokens, reference, beta=0.5, margin=0.3
        )
        expected.sum().backward()
    assert total.shape == (len(options.loss_weights),)
    assert distance(total, expected) < 1e-5
    assert correct.tolist() == expected_correct.tolist()
    assert distance(gradient, gradients(sums)) < 2e-5
    if objective != "reward":
        with torch.no_grad():
            logps = sums.sequence_log_probabilities(**collate(samples), reference=reference)
        assert distance(logps, torch.stack(values)) < 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# Noise, memory, edges

NOISY = {
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
    "llama": {"attention_dropout": 0.2},
    "lfm2": {},  # padded
}


@pytest.mark.parametrize(("architecture", "objective"), [*((name, "sft") for name in NOISY), ("gpt2", "dpo")])
def test_dropout_is_the_same_for_every_cut(architecture, objective):
    model = make_model(architecture, **NOISY[architecture])
    adapter = recipe(lora_rank=4, lora_dropout=0.3)
    sums = CausalLmSums(adapters.add_lora(model, adapter), objective, terms=["preference"], beta=0.5).train()
    for name, parameter in sums.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.3)
    noise = noise_by_sample(sums, 3)
    assert not noise.left
    per_sample = 1 if objective == "sft" else 2
    sequences_of = [make_samples((5, 9)[:per_sample], seed) for seed in range(2)] + [
        make_samples((length, 7)[:per_sample], length) for length in (3, 12, 8, 2)
    ]

    def collate_samples(numbers):
        batch = collate([sequence for number in numbers for sequence in sequences_of[number]])
        return batch if objective == "sft" else batch | {"reference": torch.zeros(len(batch["ends"]) - 1)}

    def compute(order, parts):
        sums.zero_grad()
        loss = 0.0
        for numbers in [order[first:end] for first, end in parts]:
            noise.set_samples([(0, number) for number in numbers])
            (loss_sum, *_), _ = sums(**collate_samples(numbers))
            loss_sum.backward()
            loss += loss_sum.item()
        return loss, gradients(sums)

    whole, gradient = compute([0, 1, 2, 3, 4, 5], [(0, 6)])
    cut, gradient_cut = compute([5, 1, 0, 3, 2, 4], [(0, 2), (2, 3), (3, 6)])
    assert cut == pytest.approx(whole, rel=1e-6)
    assert distance(gradient_cut, gradient) < 1e-5
    noise.set_samples([(1, number) for number in range(6)])
    assert sums(**collate_samples(range(6)))[0].item() != pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("llama", {"attention_dropout": 0.5}), ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0})],
)
def test_heads_get_noise_of_their_own(architecture, changes, monkeypatch):
    """Of probabilities that are materialised, [key heads, T R, T], each head drops others, and so does each layer."""
    sums, masks, drop = CausalLmSums(make_model(architecture, **changes)).train(), [], Dropout.drop
    num_groups = 2 if architecture == "llama" else 4

    def record(self, x, keys=None):
        is_dropped = drop(self, torch.ones_like(x), keys) == 0
        masks.extend(is_dropped.view(num_groups, 12, -1, 12).transpose(1, 2).reshape(4, -1))
        return drop(self, x, keys)

    monkeypatch.setattr(Dropout, "drop", record)
    noise_by_sample(sums, 3).set_samples([(0, 0)])
    sums(**collate(make_samples((12,))))
    assert len(masks) == 8
    for one, other in itertools.combinations(masks, 2):
        assert 0.3 < (one == other).float().mean() < 0.7


@pytest.mark.parametrize("architecture", ["gemma3_text", "gpt2", "bloom"])
def test_recomputed_activations_give_the_same_gradient(architecture):
    sums = CausalLmSums(without_dropout(make_model(architecture))).train()
    batch = collate(make_samples())
    sums(**batch)[0].sum().backward()
    expected = gradients(sums)
    sums.zero_grad()
    sums.recompute_activations()
    num_calls = []
    layer = next(module for module in sums.modules() if type(module).__name__ in sums._no_split_modules)
    next(layer.children()).register_forward_hook(lambda *_: num_calls.append(1))
    loss = sums(**batch)[0].sum()
    sums(**collate(make_samples(seed=5)))  # another micro-batch before the backward
    loss.backward()
    assert len(num_calls) == 3
    assert distance(gradients(sums), expected) < 1e-6


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "bloom"])
@pytest.mark.parametrize("ends", [[0], [0, 0], [0, 1]])
def test_no_samples_give_zeros(architecture, ends):
    sums = CausalLmSums(make_model(architecture))
    none = torch.zeros(0, dtype=torch.int64)
    token = torch.zeros(1, 1, dtype=torch.int64)
    ends = torch.tensor(ends, dtype=torch.int32)
    loss_sum, correct = sums(token, token, ends, labels=none, label_index=none, label_sequence=none)
    loss_sum.sum().backward()
    assert (loss_sum.tolist(), correct.tolist()) == ([0.0], [0])
    assert all(p.grad is not None and not p.grad.any() for p in sums.parameters())


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_right_predictions_are_counted(architecture):
    sums, batch = CausalLmSums(make_model(architecture)), collate(make_samples())
    with torch.no_grad():
        hidden = sums.hidden(batch["input_ids"], batch["position_ids"], batch["ends"])[batch["label_index"]]
        best = sums.causal_lm.get_output_embeddings()(hidden).argmax(-1)
        labels = torch.where(torch.arange(len(best)) % 3 == 0, best, (best + 1) % 61)
        assert sums(**batch | {"labels": labels})[1].tolist() == [-(-len(best) // 3)]


@pytest.mark.parametrize(
    "options", [{}, {"lora_rank": 2}, {"lora_rank": 2, "use_dora": True, "objective": "dpo"}, {"objective": "reward"}]
)
def test_example_needs_no_numbers(options):
    options = recipe(**options)
    with FakeTensorMode():
        sums = CausalLmSums.from_recipe(options, None)
        loss_sum, _ = sums(**CausalLmSums.example(options, 3))
        loss_sum.sum().backward()
    assert loss_sum.shape == (len(options.loss_weights),)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"], "tie_word_embeddings": False},
        {"lora_targets": ("q_proj", "v_proj")},
    ],
)
def test_only_adapters_are_trained(options):
    sums = CausalLmSums.from_recipe(recipe(lora_rank=2, **options), None)
    sums(**collate(make_samples()))[0].sum().backward()
    with_gradient = {name for name, p in sums.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, p in sums.named_parameters() if p.requires_grad}
    assert all("lora" in name or "modules_to_save" in name for name in with_gradient)
    num_layers = 2 if "lora_targets" in options else 7
    assert sum("lora_A" in name for name in with_gradient) == 2 * num_layers
    assert any("modules_to_save" in name for name in with_gradient) == ("modules_to_save" in options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "lama"}, "architecture lama is no model_type"),
        ({"architecture": "gpt2"}, "num_key_value_heads is 2, but architecture gpt2 has no such field"),
        ({"hidden_size": 30}, "architecture llama cannot be made"),
        ({"max_seq_length": 65}, "max_seq_length is 65, but the model has 64 positions"),
        (
            {"lora_rank": 2, "lora_targets": ("q_proj", "w_proj")},
            "lora_targets names w_proj, but .*did you mean v_proj",
        ),
        ({"lora_rank": 2, "lora_targets": ("norm",)}, "lora_targets norm cannot be adapted"),
        (
            {"lora_rank": 2, "modules_to_save": ("norms",)},
            "modules_to_save names norms, but .*has no such module: did you",
        ),
        ({"model_name_or_path": "/nowhere"}, "model_name_or_path /nowhere has no config"),
    ],
)
def test_bad_input_is_one_line(options, message):
    with pytest.raises(UsageError, match=message) as error:
        CausalLmSums.from_recipe(recipe(**options), None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "noisy"),
    [
        ("starcoder2", {"residual_dropout": 0.1, "attention_dropout": 0.1}, ["residual_dropout"]),
        ("qwen3_next", {"attention_dropout": 0.2}, ["attention_dropout"]),  # padded, with its own attention
        ("opt", {}, ["dropout"]),
        ("gpt2", {}, []),
        ("gpt_neox", {}, []),
    ],
)
def test_noise_of_functions_is_noted(architecture, changes, noisy):
    notes = [note for note in CausalLmSums(make_model(architecture, **changes)).notes if "noise" in note]
    assert [note.split(" of ")[0] for note in notes] == noisy


def test_unknown_head_is_refused():
    model = make_model("granite")
    model.config.logit_scale = 3.0  # which Granite does not look at
    with pytest.raises(UsageError, match="GraniteForCausalLM computes its logits in a way"):
        CausalLmSums(model)


def test_vocabulary_holds_the_tokenizer(tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    source = SimpleNamespace(tokenizer=SimpleNamespace(__len__=lambda self: 70))
    source.tokenizer = type("Tokenizer", (), {"__len__": lambda self: 70})()
    with pytest.raises(UsageError, match="the tokenizer has 70 tokens, but the model embeds 61"):
        build_model(recipe(model_name_or_path=str(tmp_path)), source)
    loaded = build_model(recipe(model_name_or_path=str(tmp_path)))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in loaded.state_dict().items())


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of adapters


class AdapterRun:
    """A model with adapters, its optimizer and its checkpoints, without a run around them."""

    def __init__(self, output_dir, model_seed=0, adapter_seed=0):
        fresh_accelerator()
        self.recipe = recipes.load("bert_small_cpu", {}, task="bert_pretraining")
        self.accelerator, self.output_dir = launch.create_accelerator(), output_dir
        torch.manual_seed(model_seed)
        base = build_model(recipe())
        torch.manual_seed(adapter_seed)
        model = CausalLmSums(adapters.add_lora(base, recipe(lora_rank=2, use_dora=True)))
        self.fingerprints = {"samples": "1"} | checkpoint.fingerprint_frozen(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        settings = RunSettings(recipe="", output_dir=str(output_dir))
        self.saver = checkpoint.Saver(
            self.accelerator,
            self.recipe,
            settings,
            checkpoint.Trained(self.model, self.optimizer, self.fingerprints),
            0,
            Reduction(self.accelerator, self.recipe, settings),
        )

    def step(self, number):
        self.model(**collate(make_samples(seed=number)))[0].sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def load(self):
        folder, state = checkpoint.find(self.accelerator, "latest", self.output_dir, self.recipe)
        checkpoint.load(self.accelerator, folder, state, self.model, self.optimizer, self.fingerprints)
        return folder


def test_checkpoints_hold_adapters_alone(tmp_path):
    run = AdapterRun(tmp_path)
    run.step(1)
    run.saver.save(1, 0, "")
    run.step(2)
    resumed = AdapterRun(tmp_path, adapter_seed=7)
    folder = resumed.load()
    tensors = checkpoint.read(folder, "model")
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    assert {f"model.{name}" for name in tensors} == {
        name.removesuffix(".default.weight" if "magnitude" in name else "").replace(".default", "") for name in trained
    }, "peft's names in its files"
    assert (folder / "adapter_config.json").exists()
    resumed.step(2)
    for (name, expected), (_, value) in zip(
        run.model.named_parameters(), resumed.model.named_parameters(), strict=True
    ):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}, {"architecture": "gpt2"}])
def test_merged_weights_compute_what_the_adapter_did(options):
    options = {"num_key_value_heads": None} | options if "architecture" in options else options
    sums = CausalLmSums.from_recipe(recipe(lora_rank=2, **options), None).eval()
    for name, parameter in sums.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    samples = make_samples()
    expected = sums(**collate(samples))[0]
    assert merge_adapter(sums, [tokens for tokens, _ in samples]) < 1e-3
    assert not any("lora" in name for name, _ in sums.named_parameters())
    assert distance(sums(**collate(samples))[0], expected) < 1e-6


@pytest.mark.parametrize(
    ("precision", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 0), (torch.float16, 1e-3)], ids=str
)
def test_a_frozen_base_is_held_in_the_bits_of_its_files(tmp_path, precision, bound, monkeypatch):
    """With the numbers of a base in float32; under autocast to bfloat16 to the bit."""
    make_model("llama", tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path)
    options = {"architecture": None, "model_name_or_path": str(tmp_path), "lora_rank": 2}
    results = []
    for is_held in (True, False):
        if not is_held:
            monkeypatch.setattr(quantization, "hold_base", lambda *_: None)
        torch.manual_seed(0)
        sums = CausalLmSums.from_recipe(recipe(**options), None)
        for name, parameter in sums.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss, _ = sums(**collate(make_samples()))
        loss.sum().backward()
        results.append([loss, *(p.grad for p in sums.parameters() if p.requires_grad)])
        matrices = {p.dtype for p in sums.parameters() if p.ndim == 2 and not p.requires_grad}
        assert matrices == ({torch.bfloat16} if is_held else {torch.float32})
        quantization.dequantize_base(sums)
        assert {p.dtype for p in sums.parameters()} == {torch.float32}
        assert sums.causal_lm.get_output_embeddings().weight is sums.causal_lm.get_input_embeddings().weight
    assert len(results[0]) > 10
    assert max(distance(a, b) for a, b in zip(*results, strict=True) if b.any()) <= bound


def test_a_merge_in_few_bits_loses_the_adapter():
    """As it was measured: a small adapter, a base in bfloat16."""
    samples, lost = [tokens for tokens, _ in make_samples()], {}
    for dtype in (torch.bfloat16, torch.float32):
        sums = CausalLmSums.from_recipe(recipe(lora_rank=2), None)
        for name, parameter in sums.named_parameters():
            parameter.data = parameter.data.bfloat16().float()
            if "lora_B" in name:
                nn.init.normal_(parameter, std=1e-3)
        lost[dtype] = merge_adapter(sums, samples, dtype)
        assert {parameter.dtype for parameter in sums.parameters()} == {torch.float32}
    assert lost[torch.bfloat16] > 0.3
    assert lost[torch.float32] < 1e-3


def test_adapters_are_not_resumed_on_another_base(tmp_path):
    run = AdapterRun(tmp_path)
    run.saver.save(1, 0, "")
    with pytest.raises(
        UsageError, match=r"on another base\. Give the base of its adapter .fingerprints: frozen weights "
    ):
        AdapterRun(tmp_path, model_seed=1).load()


@pytest.mark.parametrize(("architecture", "objective"), [("llama", "sft"), ("llama", "dpo"), ("gemma2", "sft")])
def test_few_logits_exist_at_once(architecture, objective, monkeypatch):
    """At most `CPU_LOGITS`, or `CPU_ROWS` rows of them, with the same loss and gradient."""
    batch, sizes = collate(make_samples()), []

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        model = CausalLmSums(make_model(architecture).double(), objective, beta=0.1, terms=("one",))
        sums, _ = model(**batch, reference=torch.zeros(len(LENGTHS)))
        sums.sum().backward()
        return sums, model.causal_lm.get_input_embeddings().weight.grad

    whole = compute()
    monkeypatch.setattr(losses, "CPU_LOGITS", 100)
    monkeypatch.setattr(losses, "CPU_ROWS", 5)
    with Watch(
        F.log_softmax, lambda softmax, x, *more, **options: sizes.append(x.shape) or softmax(x, *more, **options)
    ):
        parts = compute()
    for ours, true in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-10, atol=1e-12)
    assert len(sizes) > 4
    assert {rows <= 5 and classes == 61 for rows, classes in sizes} == {True}


def test_probabilities_of_attention_are_kept_once_in_16_bits():
    """They are most of what a long sequence keeps for the backward: heads x length x length numbers per layer."""
    sums, kept = CausalLmSums(make_model("llama")), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append((x.shape, x.dtype)) or x, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        sums(**collate(make_samples([40])))
    # [sequences x key heads, length x 2 heads, length]
    tables = [dtype for shape, dtype in kept if len(shape) == 3 and shape[1] == 2 * shape[2] >= 80]
    assert tables
    assert set(tables) == {torch.bfloat16}
