"""Weights of a base in 4 bits, and moments in 8 bits: bitsandbytes' numbers, exact steps, checkpoints, merges."""

import json

import pytest
import torch
from cases import thorough
from compare import check, hash_run, relative
from torch import nn
from transformers import AutoModelForCausalLM

from samestep.contrib.nf4 import Nf4Linear, quantize_base
from samestep.errors import UsageError
from samestep.models.causal_lm import CausalLmSums
from samestep.models.quantization import dequantize_base
from samestep.recipe.catalog import load
from samestep.step.optim import AdamW8bit
from samestep.training import checkpoint

# No name of this module, for pytest asks all of them whether they are fixtures, which would load it in every process
pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
FLAGS = "--global_batch_size 10 --lora_rank 4 --lora_alpha 8 --train_on all --lora_dropout 0.1 --base_quantization nf4"
PROGRAM = "finetune_causal_lm"


@pytest.mark.parametrize("shape", [(128, 64), (33, 7), thorough((16, 32)), thorough((300, 90))])
def test_codes_are_those_of_bitsandbytes(shape):
    from bitsandbytes import functional

    torch.manual_seed(0)
    linear = nn.Linear(*shape[::-1])
    with torch.no_grad():
        linear.weight *= torch.rand(shape[0], 1)
    ours = Nf4Linear(linear)
    with torch.compiler.set_stance("force_eager"):  # else it makes machine code of its plain operators: 11 s
        codes, state = functional.quantize_4bit(
            linear.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
    assert ours.weight.equal(codes)
    assert (ours.scale_codes.int() - state.absmax.int()).abs().max() <= 1  # where two levels are equally near
    assert ours.scale_steps.equal(state.state2.absmax)
    assert (ours.scale_codes != state.absmax).float().mean() < 0.05
    # In plain arithmetic: bitsandbytes' own kernel of CPUs is wrong where a block ends inside a row
    places = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten().long()[: linear.weight.numel()]
    scales = functional.create_dynamic_map()[ours.scale_codes.long()].view(-1)
    scales = scales * ours.scale_steps.repeat_interleave(256)[: len(scales)] + ours.scale_mean
    expected = state.code[places] * scales.repeat_interleave(64)[: len(places)]
    assert relative(ours.dequantize(), expected.view(shape)) < 1e-6
    assert relative(ours.dequantize(), linear.weight) < 0.12
    assert ours.dequantize(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_matmul_is_that_of_the_rounded_weight(dtype):
    torch.manual_seed(0)
    ours = Nf4Linear(nn.Linear(64, 24))
    x = torch.randn(5, 64, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = ours(x)
    assert y.dtype == dtype
    (gradient,) = torch.autograd.grad(y.double().square().sum(), x)
    weight, tolerance = ours.dequantize(dtype).double(), 1e-14 if dtype == torch.float64 else 1e-2
    expected = x.to(dtype).double() @ weight.T + ours.bias.double()
    assert relative(y.double(), expected) < tolerance
    assert relative(gradient.double(), 2 * expected @ weight) < tolerance
    assert not any(parameter.requires_grad for name, parameter in ours.named_parameters() if name != "bias")


def test_head_and_trained_modules_stay_whole_and_a_model_without_linear_layers_is_refused():
    changes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 300}
    model = CausalLmSums.from_recipe(load("sft_small_cpu", changes), None).model
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    note = quantize_base(model, ["up_proj"])
    rounded = {name for name, module in model.named_modules() if isinstance(module, Nf4Linear)}
    assert len(rounded) == 6
    assert not any(name.endswith(("up_proj", "lm_head")) for name in rounded)
    assert "of the base's weights are held in 4 bits (nf4)" in note
    dequantize_base(model)
    for name, tensor in model.state_dict().items():
        if name.removesuffix(".weight") in rounded:
            assert 0 < relative(tensor, own[name]) < 0.12
        else:
            assert tensor.equal(own[name])
    gpt2 = CausalLmSums.from_recipe(
        load("sft_small_cpu", changes | {"architecture": "gpt2", "num_key_value_heads": None}), None
    )
    with pytest.raises(UsageError, match="base_quantization is nf4, but GPT2LMHeadModel has no linear layers"):
        quantize_base(gpt2.model)


def test_a_step_over_a_base_in_4_bits_is_exact_and_resumes(train):
    """Another cut, with recomputed activations; stopped and resumed; checkpoints hold nothing of the base."""
    whole = train("whole", f"{FLAGS} --per_device_train_batch_size 10 --dtype float64", program=PROGRAM)
    cut = f"{FLAGS} --per_device_train_batch_size 3 --dtype float64 --gradient_checkpointing"
    train("cut", f"{cut} --stop_after_step 4", program=PROGRAM)
    output_dir = train("cut", f"{cut} --resume_from_checkpoint latest", program=PROGRAM)
    check(output_dir, whole, "float64")
    tensors = checkpoint.read(output_dir / "checkpoint-10", "model")
    assert tensors
    assert all("lora" in name for name in tensors)
    flags = cut.replace(" --base_quantization nf4", "")
    with pytest.raises(UsageError, match="base_quantization nf4 there, None here"):
        train("cut", f"{flags} --resume_from_checkpoint latest", program=PROGRAM)


def test_a_merge_is_into_the_weights_that_the_base_computes_with(train, capsys):
    start = train("start", "--global_batch_size 10 --max_train_steps 1", program=PROGRAM)
    digest = (start / "model.safetensors").read_bytes()
    names = "architecture vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    names += " max_position_embeddings tie_word_embeddings initializer_range"
    shape = " ".join(f"--{name} none" for name in names.split())
    flags = f"{FLAGS} {shape} --model_name_or_path {start}"
    apart = train("apart", flags, program=PROGRAM)
    merged = train("merged", f"{flags} --merge_adapter", program=PROGRAM)
    results = json.loads((merged / "all_results.json").read_text())
    assert 0 <= results["merge_loss"] < 1e-4
    assert "merged weights in float32 lose 0.00%" in capsys.readouterr().out
    assert (start / "model.safetensors").read_bytes() == digest
    assert "load_in_4bit=True" in (apart / "README.md").read_text()
    assert not list(merged.glob("adapter_*"))
    losses = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"] for folder in (apart, merged)
    ]
    again = train("again", f"--train_on all {shape} --model_name_or_path {merged} --max_train_steps 1", program=PROGRAM)
    first = json.loads((again / "metrics.jsonl").read_text().splitlines()[0])
    assert losses == pytest.approx([first["eval_loss"]] * 2, rel=1e-5)
    assert AutoModelForCausalLM.from_pretrained(merged).dtype == torch.float32


def test_moments_in_8_bits_are_those_of_bitsandbytes_and_near_adamw():
    from bitsandbytes import optim

    def run(make):
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(100, 90)), nn.Parameter(torch.randn(70))]
        optimizer = make(parameters)
        for step in range(5):
            torch.manual_seed(step)
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        return torch.cat([parameter.detach().flatten() for parameter in parameters]), optimizer

    options = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.1}
    ours, optimizer = run(lambda parameters: AdamW8bit(parameters, **options))
    theirs, _ = run(lambda parameters: optim.AdamW8bit(parameters, **options))
    whole, _ = run(lambda parameters: torch.optim.AdamW(parameters, **options))
    start, _ = run(lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    assert relative(ours, theirs) < 1e-6
    assert 1e-3 < relative(ours - start, whole - start) < 0.1
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.uint8
    optimizer.found_inf = torch.tensor(1.0)
    before = [parameter.clone() for parameter in optimizer.param_groups[0]["params"]]
    optimizer.step()
    assert all(a.equal(b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True))


def test_a_run_with_moments_in_8_bits_resumes_to_the_bit(train, capsys):
    flags = "--global_batch_size 10 --optimizer adamw_8bit --hidden_size 64 --intermediate_size 128"
    whole = train("whole", flags, program=PROGRAM)
    assert "optimizer adamw_8bit is not AdamW" in capsys.readouterr().out
    assert "adamw_8bit with betas" in (whole / "README.md").read_text()
    train("parts", f"{flags} --stop_after_step 4", program=PROGRAM)
    parts = train("parts", f"{flags} --resume_from_checkpoint latest", program=PROGRAM)
    assert hash_run(parts) == hash_run(whole)
    moments = checkpoint.read(whole / "checkpoint-10", "optimizer")
    assert {tensor.dtype for name, tensor in moments.items() if name.endswith("mlp.up_proj.weight/exp_avg")} == {
        torch.uint8
    }
