"""What is private or replaced of other libraries does what it is taken for; what an upgrade changes fails here."""

import ctypes
import http.server
import inspect
import itertools
import os
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import accelerate.utils
import datasets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from common import fresh_accelerator
from forks import call_in_fork
from hooks import Watch, list_calls
from image_bases import make_image_base
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
)
from transformers.integrations import moe
from transformers.utils.chat_template_utils import render_jinja_template
from waiting import PATIENCE, until

from samestep._internals import (
    accelerate_state,
    chat_rendering,
    datasets_rows,
    late_imports,
    libc,
    torch_autograd,
    torch_distributed,
    torch_operators,
    torch_tracing,
    transformers_models,
)
from stepaudit import _internals as of_audit

# ------------------------------------------------------------------------------------------------------------- output


def test_libraries_show_bars_of_long_work_only(trainings, tmp_path):
    """The noise is there without it: an upgrade that changes where it comes from is noticed."""
    trainings.run([str(tmp_path)], 1, module="run_noise")
    words = ["SHORT", "LONG", "Loading weights", "Writing model shards", "LOAD REPORT", "Retrying in 1s"]
    printed = {name: (tmp_path / name).read_text() for name in ("loud", "quiet")}
    assert [word for word in words if word in printed["loud"]] == words
    assert [word for word in words if word in printed["quiet"]] == ["LONG"]


# ------------------------------------------------------------------------------------------------------------- imports


def test_a_package_is_loaded_when_it_is_used(monkeypatch, tmp_path):
    (tmp_path / "slow_package").mkdir()
    (tmp_path / "slow_package" / "__init__.py").write_text("import os; os.environ['LOADED'] = 'yes'; value = 7")
    (tmp_path / "slow_package" / "part.py").write_text("other = 8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LOADED", "no")

    def load() -> None:
        late_imports.load_when_used("slow_package")
        late_imports.load_when_used("no_such_package")
        assert "no_such_package" not in sys.modules
        import slow_package

        found = inspect.getmodule(slow_package.__spec__.loader.exec_module)
        assert found is not slow_package, "which looks at all modules"
        assert os.environ["LOADED"] == "no"
        from slow_package import part

        assert os.environ["LOADED"] == "yes"
        assert (slow_package.value, part.other) == (7, 8)
        late_imports.load_when_used("slow_package")
        assert sys.modules["slow_package"] is slow_package, "it was loaded already"

    assert call_in_fork(load) == (0, "")


def test_a_package_that_cannot_be_loaded_is_not_there_afterwards(monkeypatch, tmp_path):
    (tmp_path / "broken_package").mkdir()
    (tmp_path / "broken_package" / "__init__.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    late_imports.load_when_used("broken_package")
    import broken_package

    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        broken_package.value  # noqa: B018
    assert "broken_package" not in sys.modules


# ---------------------------------------------------------------------------------------------------------------- libc

FAULTS = """
import resource, sys
from samestep._internals.libc import stop_malloc_returning_memory
if sys.argv[1] == "kept":
    assert stop_malloc_returning_memory()
size = 2**25
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        b"a" * size  # written
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_malloc_keeps_freed_memory():
    """Pages are handed out once, not for every tensor anew."""
    measured = [
        int(subprocess.run([sys.executable, "-S", "-c", FAULTS, mode], capture_output=True, check=True).stdout)
        for mode in ("kept", "not")
    ]
    assert measured[0] < measured[1] / 10


def test_another_libc_is_left_as_it_is():
    assert not libc.stop_malloc_returning_memory(object())


# ---------------------------------------------------------------------------------------------------- torch.distributed


def test_parameters_without_memory_get_some_and_others_stay():
    model = nn.Sequential(nn.Linear(2, 3, device="meta"), nn.Linear(3, 2))
    numbers = model[1].weight.detach().clone()
    torch_distributed.allocate(model, torch.device("cpu"))
    assert not model[0].weight.is_meta
    assert torch.equal(model[1].weight, numbers)


@pytest.fixture
def alone():
    """Make a process group of this process; the store by which it was made."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


NUM_BUCKETS = 2


@pytest.fixture
def wrapped(alone):
    """Wrap three layers, whose gradients are reduced in two buckets. The reducer is gone before its process group is."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 1))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    yield model
    if hasattr(model, "reducer"):
        torch_distributed.release(model)


def backward(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 1200).view(4, 300)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_the_store_is_the_one_that_connects_the_processes(alone):
    store, num_keys = torch_distributed.default_store(), alone.num_keys()
    store.set("said", "yes")
    assert alone.num_keys() == num_keys + 1
    assert store.get("said") == b"yes"
    assert store.check(["said"])
    assert not store.check(["unsaid"])


def test_a_total_is_waited_for_where_it_is_used(alone):
    total = torch_distributed.total(torch.tensor([3, 4]))
    assert type(total).__name__ == "AsyncCollectiveTensor"
    assert torch.equal(total + 0, torch.tensor([3, 4]))
    assert total.dtype == torch.int64


def test_collectives_are_counted(wrapped):
    """One for each bucket; buckets are rebuilt once, after the first backward."""
    count = [torch_distributed.num_collectives(wrapped)]
    for call in (backward, torch_distributed.rebuild_buckets, backward, torch_distributed.rebuild_buckets, backward):
        call(wrapped)
        count.append(torch_distributed.num_collectives(wrapped))
    first, rebuilt, second, nothing, third = (
        second_count - first_count for first_count, second_count in itertools.pairwise(count)
    )
    assert first >= 1
    assert rebuilt >= 1
    assert nothing == 0
    assert second == third == NUM_BUCKETS


@pytest.mark.parametrize("begun", range(NUM_BUCKETS + 1))
def test_zeros_take_the_place_of_a_failed_backward(wrapped, begun):
    """As many reductions as are left; a new reducer after it computes what the first did."""
    expected = backward(wrapped)
    torch_distributed.rebuild_buckets(wrapped)
    wrapped(torch.ones(1, 300)).sum()  # its backward fails
    count = torch_distributed.num_collectives(wrapped)
    torch_distributed.reduce_zeros(wrapped, begun)
    assert torch_distributed.num_collectives(wrapped) - count == NUM_BUCKETS - begun
    torch_distributed.begin_again(wrapped, gradient_as_bucket_view=True)
    assert all(map(torch.equal, backward(wrapped), expected))


def test_a_broken_backward_needs_a_new_reducer(wrapped):
    """Were it not so, `begin_again` could go."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError

    expected = backward(wrapped)
    wrapped.module.insert(1, nn.Identity())
    wrapped.module[1].forward = Broken.apply
    with pytest.raises(MemoryError):
        backward(wrapped)
    del wrapped.module[1]
    with pytest.raises(RuntimeError, match="finished reduction in the prior iteration"):
        backward(wrapped)
    torch_distributed.begin_again(wrapped, gradient_as_bucket_view=True)
    assert all(map(torch.equal, backward(wrapped), expected))


@pytest.mark.parametrize(("hook", "dtype"), [(bf16_compress_hook, torch.bfloat16), (fp16_compress_hook, torch.float16)])
def test_gradients_are_sent_in_16_bits_on_cpus(wrapped, monkeypatch, hook, dtype):
    """torch without CUDA refuses bf16 by the hook's name; zeros of a process that failed go through the hook, too."""
    expected, name = backward(wrapped), bf16_compress_hook.__name__
    if dtype == torch.bfloat16 and torch.version.cuda is None:
        monkeypatch.setattr(bf16_compress_hook, "__name__", "bf16_compress_hook")
        with pytest.raises(TypeError, match="required CUDA"):
            wrapped.register_comm_hook(None, hook)
    torch_distributed.let_gloo_add_bf16()
    wrapped.register_comm_hook(None, hook)
    assert all(map(torch.equal, backward(wrapped), [gradient.to(dtype).float() for gradient in expected]))
    assert not all(map(torch.equal, backward(wrapped), expected))
    wrapped(torch.ones(1, 300)).sum()  # its backward fails
    count = torch_distributed.num_collectives(wrapped)
    torch_distributed.reduce_zeros(wrapped, 1)
    assert torch_distributed.num_collectives(wrapped) - count == NUM_BUCKETS - 1
    bf16_compress_hook.__name__ = name


def test_a_released_model_holds_no_reducer(wrapped):
    reducer = weakref.ref(wrapped.reducer)
    torch_distributed.release(wrapped)
    assert reducer() is None
    assert not hasattr(wrapped, "process_group")
    torch_distributed.release(wrapped.module)  # any other model is left as it is


def test_prepared_schedulers():
    fresh_accelerator()
    accelerator = Accelerator(cpu=True)
    assert accelerate_state.prepared_schedulers(accelerator) == []
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    assert accelerate_state.prepared_schedulers(accelerator) == [scheduler]
    assert (scheduler.step_with_optimizer, scheduler.split_batches) == (True, False)


def test_what_nodes_remember():
    x = torch.ones(3, 4, requires_grad=True)
    labels = torch.zeros(3, dtype=torch.int64)
    for operand in (5.0, torch.tensor(5.0)):
        for node in ((x * operand).grad_fn, (x / operand).grad_fn):
            assert float(torch_autograd.other_operand(node)) == 5.0
    assert torch_autograd.output_shape(x.mean().grad_fn) == ()
    assert torch_autograd.output_shape(x.mean(0).grad_fn) == (4,)
    for reduction in ("mean", "sum", "none"):
        lossy = [F.cross_entropy(x, labels, reduction=reduction), F.mse_loss(x, torch.zeros(3, 4), reduction=reduction)]
        lossy.append(F.binary_cross_entropy_with_logits(x, torch.zeros(3, 4), reduction="none"))
        assert [torch_autograd.is_mean_of_losses(loss.grad_fn) for loss in lossy] == [reduction == "mean"] * 2 + [False]


def test_pinning_reaches_what_is_nested(monkeypatch):
    with Watch(torch.Tensor.pin_memory, lambda _, tensor, *__: tensor + 1):
        nested = torch_autograd.pin_memory([{"a": torch.zeros(1), "b": None, "c": (torch.zeros(1), "text")}])
    assert nested[0]["a"] == nested[0]["c"][0] == 1
    assert (nested[0]["b"], nested[0]["c"][1]) == (None, "text")


def test_each_generation_of_workers_meets_in_keys_of_its_own(monkeypatch):
    for key, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(key, str(value))
    for number in ("1", "2", "2"):
        url = torch_distributed.register_rendezvous(number)
        store, rank, size = next(dist.rendezvous(url, timeout=timedelta(seconds=PATIENCE)))
        assert (rank, size) == (0, 1)
        assert isinstance(store, dist.PrefixStore)
        store.set("said", number)
        assert store.underlying_store.get(f"generation-{number}/said") == number.encode()


# ------------------------------------------------------------------------------------------------------ torch, operators


def test_rows_looked_up_many_times_have_the_sum_of_their_gradients():
    """In the gradient's own type: of bfloat16 torch on a CPU stops adding at 256."""
    ids = torch.tensor([[1, 3, 1], [0, 1, 2]]).repeat(200, 1)
    gradient = torch.ones(*ids.shape, 2)
    assert torch_operators.embedding_backward(gradient, ids, 5, None)[:, 0].tolist() == [200, 600, 200, 200, 0]
    assert torch_operators.embedding_backward(gradient, ids, 5, 1)[:, 1].tolist() == [200, 0, 200, 200, 0]


def test_operators_on_lists():
    torch.manual_seed(0)
    a, b, c = ([torch.rand(n) for n in (2, 3)] for _ in range(3))

    def changed(operator, *args, **more) -> list[torch.Tensor]:
        copies = [tensor.clone() for tensor in a]
        operator(copies, *args, **more)
        return copies

    def same(actual, expected):
        for tensor, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-6, atol=0)

    ops = torch_operators
    same(changed(ops.foreach_add_, b, alpha=3), [x + 3 * y for x, y in zip(a, b, strict=True)])
    same(changed(ops.foreach_add_, [2.0, 5.0]), [a[0] + 2, a[1] + 5])
    same(changed(ops.foreach_mul_, 7.0), [7 * x for x in a])
    same(changed(ops.foreach_mul_, torch.tensor(7.0)), [7 * x for x in a])
    same(changed(ops.foreach_addcmul_, b, c, [2.0, 5.0]), [a[0] + 2 * b[0] * c[0], a[1] + 5 * b[1] * c[1]])
    same(changed(ops.foreach_addcdiv_, b, c, [2.0, 5.0]), [a[0] + 2 * b[0] / c[0], a[1] + 5 * b[1] / c[1]])
    same(ops.foreach_sqrt(a), [x.sqrt() for x in a])
    half = [x.half() for x in a]
    norms = ops.foreach_norm(half, 2, torch.float64)
    assert {norm.dtype for norm in norms} == {torch.float64}
    same(norms, [x.double().norm() for x in half])


@pytest.mark.skipif(not torch_operators.has_onednn(), reason="torch is built without oneDNN")
def test_a_linear_layer_by_onednn():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    torch.testing.assert_close(torch_operators.linear_by_onednn(x, weight), F.linear(x, weight))
    torch.testing.assert_close(torch_operators.linear_by_onednn(x, weight, bias), F.linear(x, weight, bias))


def test_operators_are_replaced_on_cpus_as_long_as_the_library_lives():
    x, weight = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3, requires_grad=True)

    def products() -> list[float]:
        x.grad = None
        y = F.linear(x, weight)
        y.sum().backward()
        return [y[0, 0].item(), x.grad[0, 0].item()]

    assert products() == [3, 4]
    library = torch_operators.replace_on_cpus(mm=lambda a, b: a.new_full((len(a), b.shape[1]), 8.0))
    assert products() == [8, 8]
    del library
    assert products() == [3, 4]


# -------------------------------------------------------------------------------------------------------- torch, tracing


@pytest.mark.parametrize("mode", [torch_tracing.FakeTensorMode, lambda: torch.device("cpu")], ids=["fake", "real"])
def test_a_storage_is_told_from_others(mode):
    with mode():
        x, other = torch.empty(3, 4), torch.empty(3, 4)
    address = torch_tracing.address
    assert address(x.untyped_storage()) == address(x.t().untyped_storage()) == address(x[1:].untyped_storage())
    assert address(x.untyped_storage()) != address(other.untyped_storage())
    assert torch_tracing.is_view(x[1:])
    assert not torch_tracing.is_view(x)


def test_fake_tensors_have_no_memory():
    with torch_tracing.FakeTensorMode():
        large = torch.empty(10**7, 10**7)
        assert (large + 1).shape == large.shape


def test_operators_by_their_names():
    operators = []

    class Recorder(torch_tracing.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            operators.append(operator)
            return operator(*args, **kwargs or {})

    with Recorder():
        torch.empty(2, 2) @ torch.ones(2, 2)
        F.scaled_dot_product_attention(*torch.ones(3, 1, 1, 2, 4, requires_grad=True)).sum().backward()
    names = [torch_tracing.name(operator) for operator in operators]
    assert names[0] == "empty"
    assert torch.ops.aten.mm in map(torch_tracing.packet, operators)
    packets = [torch_tracing.packet(operator) for operator in operators]
    assert torch_tracing.ATTENTION_ON_CPUS in packets
    assert torch_tracing.ATTENTION_ON_CPUS_BACKWARD in packets
    assert torch_tracing.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]


def count_saved(function) -> dict[torch.dtype, int]:
    """Count the numbers that autograd saves for a function, by their types."""
    counts = {}

    def pack(tensor):
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return counts


def test_a_cpu_keeps_what_cuda_would():
    x = torch.ones(2, 3, 16, 8, requires_grad=True)
    attention = lambda: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)  # noqa: E731
    noise = lambda: F.dropout(x, 0.5)  # noqa: E731

    def power():
        with torch.autocast("cpu", torch.bfloat16):
            return torch.pow(x.bfloat16(), 3)

    initial = [count_saved(function) for function in (attention, noise, power)]
    with torch_tracing.imitate_cuda():
        during = [count_saved(function) for function in (attention, noise, power)]
        assert power().dtype == torch.float32
    assert [count_saved(function) for function in (attention, noise, power)] == initial
    assert power().dtype == torch.bfloat16
    assert sum(during[0].values()) < sum(initial[0].values())  # no [T, T]
    assert during[1] == {torch.bool: x.numel()}
    assert initial[1] == {torch.float32: x.numel()}
    assert during[2] == {torch.float32: x.numel()}


# ----------------------------------------------------------------------------------------------------------- accelerate


@contextmanager
def separate_accelerator():
    saved = dict(PartialState._shared_state)
    fresh_accelerator()
    try:
        yield Accelerator(cpu=True)
    finally:
        PartialState._shared_state.clear()
        PartialState._shared_state.update(saved)
        fresh_accelerator()


def test_a_step_begins_whatever_k_was_before():
    with separate_accelerator() as accelerator:
        model = accelerator.prepare(nn.Linear(1, 1))
        flags = []
        for k, done in ((3, 1), (2, 2), (3, 3)):
            accelerator.gradient_accumulation_steps = k
            accelerate_state.begin_step(accelerator)
            for _ in range(done):
                with accelerator.accumulate(model):
                    flags.append(accelerator.sync_gradients)
    assert flags == [False, False, True, False, False, True]


def test_lomo_is_searched_for_once():
    with separate_accelerator() as accelerator:
        accelerate_state.search_for_lomo_once()
        optimizer = accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters()))
        with list_calls(accelerate.utils.is_lomo_available) as calls:
            for _ in range(3):
                optimizer.step()
    assert len(calls) <= 1


def test_cpus_are_told_to_shard():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with separate_accelerator() as accelerator:
        accelerate_state.shard_on_cpus(accelerator, plugin)
        assert accelerator.distributed_type == DistributedType.FSDP
        assert accelerator.state.fsdp_plugin is plugin
        assert accelerator.is_fsdp2
        assert PartialState().distributed_type == DistributedType.FSDP


def test_groups_are_made_on_cpus():
    """What Accelerate itself refuses: two processes of a group on a CPU."""
    sizes = {"dp_replicate_size": 1, "dp_shard_size": 2}
    with separate_accelerator() as accelerator:
        with pytest.raises(ValueError, match="does not match"):
            ParallelismConfig(**sizes)._validate_accelerator(accelerator)
        accelerate_state.Groups(**sizes)._validate_accelerator(accelerator)


# --------------------------------------------------------------------------------------------------------- transformers

BERT = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def test_models_are_made_without_first_weights():
    """Theirs are normal, with a deviation of 0.02; those of torch's layers 0.07."""
    deviation = lambda: BertModel(BertConfig(**BERT)).encoder.layer[0].output.dense.weight.std().item()  # noqa: E731
    assert deviation() == pytest.approx(0.02, rel=0.1)
    with transformers_models.skip_weight_initialization():
        assert deviation() == pytest.approx(64**-0.5 / 3**0.5, rel=0.1)
    assert deviation() == pytest.approx(0.02, rel=0.1)


def test_samples_of_one_document_whatever_their_places_say():
    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=4)).eval()
    places = torch.tensor([[0, 1, 0, 1]])

    def last(first: int) -> torch.Tensor:
        """Compute the output of the last token; `first` is in another document."""
        return model(torch.tensor([[first, 1, 2, 3]]), position_ids=places, use_cache=False).last_hidden_state[0, -1]

    assert torch.equal(last(4), last(5))
    with transformers_models.assume_single_document():
        assert not torch.allclose(last(4), last(5))
    assert torch.equal(last(4), last(5))


def test_experts_multiply_by_an_operator_that_has_a_rule_for_float32():
    """The result is that of torch's kernel; a failure on fake tensors raises, and is not logged."""
    tokens, weights = torch.randn(6, 8), torch.randn(2, 8, 4)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    expected = F.grouped_mm(tokens, weights, offs=offsets)
    with transformers_models.trace_experts():
        torch.testing.assert_close(moe._grouped_mm(tokens, weights, offsets), expected)
        with torch_tracing.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(tensor) for tensor in (tokens, weights, offsets)]
            assert moe._grouped_mm(*fakes).shape == expected.shape
            with torch_tracing.silence_log(), pytest.raises(RuntimeError, match="BF16"):
                F.grouped_mm(*fakes[:2], offs=fakes[2])
            assert not torch_tracing.fake_tensor.log.disabled


@pytest.mark.parametrize("is_trained", [False, True])
def test_experts_keep_what_torchs_kernel_keeps(is_trained):
    """Of frozen weights no tokens; gradients are the same."""
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    values = torch.randn(6, 8), torch.randn(2, 8, 4)

    def compute() -> tuple[list[tuple[int, ...]], torch.Tensor]:
        tokens, weights = values[0].clone().requires_grad_(), values[1].clone().requires_grad_(is_trained)
        kept: list[tuple[int, ...]] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            product = moe._grouped_mm(tokens, weights, offsets)
        product.square().sum().backward()
        return sorted(shape for shape in kept if len(shape) > 1), tokens.grad

    kept, gradient = compute()
    with transformers_models.trace_experts():
        traced = compute()
    assert traced[0] == kept == sorted([(2, 8, 4), *[(6, 8)] * is_trained])
    torch.testing.assert_close(traced[1], gradient)


def test_attention_is_read_and_chosen():
    model = BertModel(BertConfig(**BERT))
    assert transformers_models.attention_kernel(model.config) == "sdpa"
    model.set_attn_implementation("eager")
    assert transformers_models.attention_kernel(model.config) == "eager"
    transformers_models.set_text_attention(model, "sdpa")
    assert transformers_models.attention_kernel(model.config) == "sdpa"
    assert transformers_models.set_tower_attention(model, "eager") == {}
    assert transformers_models.attention_kernel(model.config) == "sdpa"


def test_language_model_and_tower_have_kernels_of_their_own():
    """Kernels with "flash" in their name get a tower's whole row; others are called for each part of it."""
    model, _ = make_image_base("qwen2_5_vl")
    config, calls = model.config, []

    def attend(module, query, *more, **named):
        calls.append((query.shape[2], "cu_seq_lens_q" in named))
        return query.transpose(1, 2), None

    for name in ("tested_flash", "tested_parts"):
        transformers.AttentionInterface.register(name, attend)
    transformers_models.set_text_attention(model, "eager")
    assert (
        transformers_models.attention_kernel(config)
        == transformers_models.attention_kernel(config.text_config)
        == "eager"
    )
    assert transformers_models.set_tower_attention(model, "tested_flash") == {"vision_config": "sdpa"}
    assert transformers_models.attention_kernel(config) == "eager"
    grid = torch.tensor([[1, 4, 4], [1, 4, 6]])
    pixels = torch.zeros(40, 96)
    model.model.visual(pixels, grid_thw=grid)
    assert calls == [(40, True)] * 2
    calls.clear()
    transformers_models.set_tower_attention(model, "tested_parts")
    model.model.visual(pixels, grid_thw=grid)
    assert calls[-2:] == [(16, False), (24, False)]
    for supports, kernel in ((True, "sdpa"), (False, "eager")):
        config, kind = BertConfig(**BERT), type("Kind", (BertModel,), {"_supports_sdpa": supports})
        transformers_models.choose_attention(config, kind, "sdpa")
        assert kind(config).config._attn_implementation == kernel


# ------------------------------------------------------------------------------------------------------------- datasets


def test_tables_are_told_from_others():
    def table(*rows: int) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"row": list(rows)})

    fingerprint = datasets_rows.rows_fingerprint
    assert fingerprint(table(1, 2)) == fingerprint(table(1, 2)) != fingerprint(table(1, 3))
    assert fingerprint(table(1, 2).select([0])) != fingerprint(table(1, 2))
    other = table(1, 2).map(lambda row: row, new_fingerprint="named")
    assert fingerprint(other) == "named"


# ------------------------------------------------------------------------------------------------------------ the audit


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize("dataset", [list(range(4)), Stream()], ids=["map", "iterable"])
def test_batches_come_by_a_fetch_of_indices(dataset):
    iterator = iter(DataLoader(dataset, batch_size=2))
    assert isinstance(iterator, of_audit.LoaderIterator)
    methods = [of_audit.LoaderIterator.__next__, of_audit.LoaderIterator._next_index]
    with list_calls(*methods, *(kind.fetch for kind in of_audit.FETCHERS)) as calls:
        assert next(iterator).tolist() == [0, 1]
    assert [name for name, _ in calls] == ["__next__", "_next_index", "fetch"]
    assert of_audit.get_dataset(iterator) is dataset


def test_rows_of_a_table():
    rows = datasets.Dataset.from_dict({"row": list(range(10))})
    assert of_audit.find_table_rows(rows, [3, 1]) == [3, 1]
    assert of_audit.find_table_rows(rows.select([9, 7, 5, 2]), [3, 1]) == [2, 7]
    assert of_audit.find_table_rows(Subset(list(range(10)), [1]), [0]) == [0]


def test_hooks_of_a_parameter():
    called, x = [], torch.ones(1, requires_grad=True)
    assert not of_audit.has_hooks(x)
    for number in range(3):
        x.register_hook(lambda gradient, number=number: called.append(number))
    assert of_audit.has_hooks(x)
    of_audit.put_last_hook_first(x)
    (2 * x).sum().backward()
    assert called == [2, 0, 1]
    other = torch.ones(1, requires_grad=True)
    other.register_post_accumulate_grad_hook(lambda tensor: None)
    assert of_audit.has_hooks(other)


def test_changes_in_place_are_counted():
    x = torch.ones(2)
    count = of_audit.count_changes(x)
    x.add_(1)
    x[0] = 3
    assert of_audit.count_changes(x) == count + 2
    x.data.add_(1)
    assert of_audit.count_changes(x) == count + 2


def test_layers_of_any_number_of_dimensions():
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert issubclass(kind, of_audit.BatchNorm)
    for kind in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        assert issubclass(kind, of_audit.Dropout)
    assert not issubclass(nn.GroupNorm, of_audit.BatchNorm)
    assert of_audit.tree_map(lambda x: 2 * x, {"a": [1, (2,)]}) == {"a": [2, (4,)]}
    assert of_audit.tree_leaves({"a": [1, (2,)]}) == [1, 2]


def test_what_the_audit_asks_of_transforms_loaders_and_autocast():
    inside = []
    torch.func.grad(lambda x: inside.append(of_audit.is_transformed()) or x)(torch.ones(()))
    torch.func.vmap(lambda x: inside.append(of_audit.is_transformed()) or x)(torch.ones(2))
    assert inside == [True, True]
    assert not of_audit.is_transformed()
    for workers in ({}, {"num_workers": 1, "persistent_workers": True}):
        loader, counts = DataLoader(range(3), **workers), []
        for _ in range(2):  # the same iterator begins again with persistent workers
            iterator = iter(loader)
            while True:
                counts.append(of_audit.count_returned(iterator))
                if next(iterator, None) is None:
                    break
        assert counts == [0, 1, 2, 3] * 2
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    assert of_audit.get_autocast_dtype(autocast) == torch.bfloat16
    of_audit.switch_off(autocast)
    assert of_audit.get_autocast_dtype(autocast) is None
    with autocast:
        assert not torch.is_autocast_enabled("cpu")
    assert "grad" not in vars(torch.Tensor)
    p = torch.ones(2, requires_grad=True)
    of_audit.GRADIENT.__set__(p, torch.zeros(2))
    assert of_audit.GRADIENT.__get__(p).tolist() == [0, 0]


def test_a_class_says_whether_it_has_torchs_kernel_of_attention(monkeypatch):
    class Without(GPT2Model):
        _supports_sdpa = False

    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    eager = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=9, attn_implementation="eager")
    assert transformers_models.supports_sdpa(GPT2Model(config))
    assert not transformers_models.supports_sdpa(Without(eager))


# ------------------------------------------------------------------------------------------------------------- torchft


class Code:
    """An object whose unpickling would make a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.rooms
def test_a_state_brings_no_code(tmp_path):
    """torchft would unpickle it; what is replaced there is still what it calls."""
    from torch.distributed._serialization import _streaming_save
    from torchft.checkpointing import HTTPTransport

    from samestep.contrib.replication import torchft_internals

    assert "_load_from_address" in vars(HTTPTransport)
    answers = {"/plain": {"tensors": {"a": torch.arange(3.0)}, "record": "{}"}, "/code": Code(tmp_path / "made")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            _streaming_save(answers[self.path], self.wfile)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        state = torchft_internals.load_state(f"{address}/plain", PATIENCE)
        assert state["tensors"]["a"].tolist() == [0, 1, 2]
        with pytest.raises(Exception, match=r"mkdir"):
            torchft_internals.load_state(f"{address}/code", PATIENCE)
        server.shutdown()
    assert not (tmp_path / "made").exists()


@pytest.mark.rooms
def test_a_replica_alone():
    """It begins at the step that it is told, and commits; it is told of a new group."""
    from torchft.coordination import LighthouseServer

    from samestep.contrib.replication import torchft_internals

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    port, groups = lighthouse.address().rpartition(":")[2], []
    url = f"http://127.0.0.1:{port}"
    store, address = torchft_internals.open_store(url)
    assert address == ("127.0.0.1", store.port)
    manager = torchft_internals.make_manager(
        url,
        torch.device("cpu"),
        0,
        1,
        address,
        timeout=PATIENCE,
        connect_timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        min_replicas=1,
        get_state=dict,
        set_state=lambda state: None,
        on_new_group=lambda: groups.append(1),
    )
    try:
        torchft_internals.set_step(manager, 5)
        for step in (5, 6):
            manager.start_quorum()
            assert (manager.current_step(), manager.participating_rank(), manager.num_participants()) == (step, 0, 1)
            manager.allreduce(numbers := torch.arange(3), reduce_op=dist.ReduceOp.SUM).wait()
            assert numbers.tolist() == [0, 1, 2]
            assert manager.should_commit()
        assert groups == [1]
    finally:
        manager.shutdown(wait=False)
        lighthouse.shutdown()
    assert store.port > 0
    assert torchft_internals.is_reachable(f"http://127.0.0.1:{store.port}")
    until(lambda: not torchft_internals.is_reachable(url), "end of the lighthouse")  # in a thread of its own
    assert torchft_internals.find_local_address("http://127.0.0.1:9") == "127.0.0.1"


# ---------------------------------------------------------------------------------------------------------- chat templates

FIRST = "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}<{{ m.content }}>{% endfor %}"
SECOND = (
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    "{% for m in messages %}{{ m.role }}{% for n in messages[:1] %}{{ n.content }}{% endfor %};{% endfor %}."
)


@pytest.mark.parametrize("round", [1, 2])
def test_spans_say_which_turn_each_part_is_of(round):
    """Jinja computes nothing of them when it compiles; templates of one process do not mix."""
    turns = [{"role": role, "content": role[0]} for role in ("user", "tool", "assistant")]
    options = {"add_generation_prompt": False}
    text, spans = chat_rendering.render_turns(FIRST, turns, None, "2026-03-01", False, options)
    assert (text, spans) == ("<u><a>", [[0, 3, 0], [3, 6, 2]])
    text, spans = chat_rendering.render_turns(SECOND, turns, None, f"202{round}-03-01", False, options)
    assert text == f"202{round}useru;toolu;assistantu;."
    assert [(text[start:end], turn) for start, end, turn in spans] == [
        ("useru;", 0),
        ("tool", 1),
        ("u", 0),
        (";", 1),
        ("assistant", 2),
        ("u", 0),
        (";", 2),
    ]
    (plain,), _ = render_jinja_template(conversations=[turns], chat_template=FIRST)
    assert plain == "<u><a>"
    marked = FIRST.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert chat_rendering.render_turns(marked, turns, None, "2026-03-01", True, options) == ("<u><a>", [[1, 2], [4, 5]])


@pytest.mark.parametrize(("kind", "num_layers"), [("Mixtral", 2), ("DeepseekV3", 1), ("Llama", 0)])
def test_routers_are_those_whose_outputs_transformers_records(kind, num_layers):
    """DeepSeek's first layer is dense."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"vocab_size": 20, "intermediate_size": 16, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
    shape |= {"num_local_experts": 4} if kind == "Mixtral" else {}
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**shape))
    found = transformers_models.find_routers(nn.ModuleList([model]))
    assert len(found) == num_layers
    assert all(type(router).__name__.endswith("Router") for router in found)


@pytest.mark.parametrize(
    ("name", "has_method"), [("t5", True), ("bart", True), ("mbart", True), ("m2m_100", False), ("whisper", False)]
)
def test_targets_are_shifted_as_the_model_does_it(name, has_method):
    """Its own forward makes the decoder's inputs of labels; where all models have the method, the function can go."""
    sizes = {
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 8,
        "num_layers": 1,
        "num_heads": 2,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    ids = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
    config = AutoConfig.for_model(name, **sizes, **ids, vocab_size=20, max_source_positions=4)
    kind = AutoModelForSpeechSeq2Seq if name == "whisper" else AutoModelForSeq2SeqLM
    model = kind.from_config(config).eval()
    labels = torch.tensor([[4, 5, 6, 2], [7, 2, 1, 1]])
    source = torch.zeros(2, 80, 8) if name == "whisper" else labels
    seen = []

    def note(_, arguments, options):
        seen.append(options["input_ids"])

    model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
    model(**{model.main_input_name: source}, labels=labels)
    assert seen[0].equal(transformers_models.shift_right(model, labels))
    assert hasattr(model, "prepare_decoder_input_ids_from_labels") is has_method
