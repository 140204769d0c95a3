"""Log-probabilities of pairs under the start model: computed once, kept, and the same to the bit on any number of processes."""

import math
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import safetensors.torch
import torch
from common import ROOT, fresh_accelerator, launch_environment
from run_reference import BATCH_SIZE, NUM_PAIRS, Bigrams, Pairs
from torch import nn

from samestep.contrib.reference import add_reference, reference_logps
from samestep.errors import UsageError
from samestep.training.launch import create_accelerator

PAIRS = Pairs()


@pytest.fixture
def compute(tmp_path):
    """Compute the numbers in this process: compute(model, pairs) -> [pairs, 2]."""
    fresh_accelerator()
    accelerator = create_accelerator()

    def run(model, pairs=PAIRS, batch_size: int = BATCH_SIZE) -> torch.Tensor:
        return torch.from_numpy(
            reference_logps(accelerator, model, pairs, 0, batch_size, tmp_path / "reference.safetensors")
        )

    return run


def is_near(values: torch.Tensor, true: torch.Tensor) -> bool:
    return torch.allclose(values, true.double(), rtol=1e-6, atol=1e-6)


def plain(model: Bigrams, pairs: Pairs) -> torch.Tensor:
    """Compute the same sequence by sequence, by torch alone."""
    rows = []
    for number in range(len(pairs)):
        for tokens in pairs.draw(0, number).tokens:
            log_p = model.head(model.embedding(tokens[:-1])).log_softmax(-1)
            rows.append(log_p.gather(1, tokens[1:, None]).sum())
    return torch.stack(rows).view(-1, 2).detach()


def test_each_pair_has_its_numbers_in_the_datasets_order(compute):
    model = Bigrams(torch.float64).train()
    values = compute(model)
    assert torch.allclose(values, plain(model, PAIRS), rtol=1e-12)
    assert model.training, "evaluation mode, in which there is no dropout, is left again"


def test_what_is_known_is_not_computed_again(compute, tmp_path):
    model, path = Bigrams(), tmp_path / "reference.safetensors"
    values, num_forwards = compute(model), model.num_forwards
    assert num_forwards == math.ceil(NUM_PAIRS / BATCH_SIZE)
    assert torch.equal(compute(model, batch_size=7), values)
    assert model.num_forwards == num_forwards
    # Other weights, other data, a file that is broken or another's: all is computed again.
    with torch.no_grad():
        model.head.weight[3, 3] += 1
    assert is_near(compute(model), plain(model, PAIRS))
    other = compute(model, Pairs(seed=1))
    assert is_near(other, plain(model, Pairs(seed=1)))
    assert is_near(compute(model), plain(model, PAIRS))
    num_forwards = model.num_forwards
    for content in (b"", b"no tensors at all", safetensors.torch.save({"reference": torch.zeros(NUM_PAIRS, 2)})):
        path.write_bytes(content)
        assert is_near(compute(model), plain(model, PAIRS))
    assert model.num_forwards == num_forwards + 3 * math.ceil(NUM_PAIRS / BATCH_SIZE)


def test_numbers_of_a_folder_that_is_full_are_used_all_the_same(compute, tmp_path, capsys):
    (tmp_path / "reference.safetensors.partial").mkdir()
    model = Bigrams()
    assert is_near(compute(model), plain(model, PAIRS))
    assert "cannot be written" in capsys.readouterr().err


def test_adapters_are_no_part_of_the_reference(compute):
    base = Bigrams()
    true = plain(base, PAIRS)
    wrapped = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["embedding", "head"], init_lora_weights=False)
    )

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = wrapped

        def sequence_log_probabilities(self, inputs, labels, label_sequence, ends, reference):
            inner = self.network.base_model.model
            log_p = inner.head(inner.embedding(inputs)).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
            return log_p.new_zeros(len(ends) - 1).index_add_(0, label_sequence, log_p)

    model = Sums()
    assert is_near(compute(model), true)
    micro_batch = PAIRS.collate([PAIRS.draw(0, 0)])
    del micro_batch["counts"]
    assert not torch.allclose(model.sequence_log_probabilities(**micro_batch), true[0], rtol=1e-3), (
        "the adapter is on again"
    )


def test_numbers_that_are_not_finite_are_refused(compute):
    model = Bigrams()
    with torch.no_grad():
        model.head.weight[int(PAIRS.draw(0, 5).tokens[0][1])] = math.inf
    with pytest.raises(UsageError, match=r"log-probability that is not finite"):
        compute(model)


def test_sources_are_given_their_numbers(tmp_path):
    fresh_accelerator()

    class Model(Bigrams):
        from_recipe = classmethod(lambda cls, recipe, train: cls())
        kernel_candidates = lambda self, *options: {"one": lambda: None}  # noqa: E731

    train, held_out = Pairs(), Pairs(seed=1, num_pairs=3)
    settings = SimpleNamespace(per_device_eval_batch_size=4, dtype="float64")
    run = SimpleNamespace(recipe=SimpleNamespace(seed=0), settings=settings, accelerator=create_accelerator())
    run.output_dir, run.data = tmp_path, (train, held_out)
    add_reference(run, Model, train, held_out)
    add_reference(run, Model, train, None)
    model = Model().double()
    for source in (train, held_out):
        assert np.allclose(source.reference, plain(model, source), rtol=1e-6)
    assert len(list(tmp_path.glob(".reference-*"))) == 2


@pytest.mark.distributed
def test_the_same_to_the_bit_on_any_number_of_processes(compute, tmp_path, trainings):
    alone = compute(Bigrams())
    for num_processes in (2, 3):
        folder = tmp_path / f"{num_processes}"
        folder.mkdir()
        environment = launch_environment(
            ROOT / "accelerate_configs" / "2xcpu.yaml", "--num_processes", str(num_processes)
        )
        trainings.run([str(folder)], num_processes, environment=environment, module="run_reference")
        for rank in range(num_processes):
            (first, second), num_forwards = torch.load(folder / f"{rank}.pt", weights_only=False)
            assert np.array_equal(first, alone)
            assert np.array_equal(second, alone)
            assert num_forwards == math.ceil(math.ceil(NUM_PAIRS / BATCH_SIZE) / num_processes), "each its share, once"
