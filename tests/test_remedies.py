"""Every cause's remedy, as stepaudit/causes.py prints it, is applied to a program that shows the cause: then it is exact.

Before, the program is named: test_audit_script.py audits it as it is, for the cause at its head.
"""

import re

import corpus
import pytest
from cases import thorough

from stepaudit.causes import HARMLESS, KINDS

Change = tuple[str, str]
# Cause -> program, and what is written in the place of which text.
REMEDIES: dict[str, tuple[str, list[Change]]] = {
    "average": (
        "average_per_micro_step",
        [("optimizer.zero_grad()\n    average.update", "optimizer.zero_grad()\n        average.update")],
    ),
    "batch_norm": ("batch_norm", [("model = mlp(norm=True)\n", "model = mlp(norm=True)\nmodel[1].eval()\n")]),
    "mixed_samples": ("centred_over_the_batch", [("hidden.mean(0)", "hidden.mean(1, keepdim=True)")]),
    "mixed_loss": ("selfdistilled_centre_fp16", [("logits.mean(0)", "logits.mean(1, keepdim=True)")]),
    "gathered_without_gradient": (
        "vicreg_statistics_gathered",
        [
            ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport torch.distributed.nn\n"),
            ("    dist.all_gather(parts, z)\n", "    parts = list(dist.nn.functional.all_gather(z))\n"),
        ],
    ),
    "expert_balance": ("experts_balanced_per_micro_batch", [("0.1 * balance", "0.0 * balance")]),
    "dropout": ("dropout_by_place", [("= Dropout(0.3)", "= Dropout(0.0)")]),
    "state": (
        "observation_normalizer",
        [("    value = DDP(value)\n", "    value = DDP(value)\nvalue.eval()\n")],
    ),
    "padding": (
        "pooled_over_padding",
        [
            ("forward(self, input_ids, **_)", "forward(self, input_ids, attention_mask)"),
            (
                "        return self.head(torch.tanh(self.words(input_ids)).mean(1))",
                "        x, mask = torch.tanh(self.words(input_ids)), attention_mask\n"
                "        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))",
            ),
            ('model(batch["input_ids"])', 'model(batch["input_ids"], batch["attention_mask"])'),
        ],
    ),
    "packing": (
        "chess_games_packed",
        [
            (
                "        y = F.scaled_dot_product_attention(q, key, v, is_causal=True)",
                "        is_same = self.games[:, None] == self.games\n"
                "        y = F.scaled_dot_product_attention(q, key, v, attn_mask=is_same.tril())",
            ),
            (
                "        return self.head(self.blocks(",
                "        for block in self.blocks:\n"
                "            block.games = (places[0] == 0).cumsum(0)\n"
                "        return self.head(self.blocks(",
            ),
        ],
    ),
    "mean_of_means": (
        "mean_of_means",
        [
            ("collate, flags, gpt2, sentences", "collate, flags, gpt2, next_token_sum, sentences, targets"),
            ("loader = DataLoader(", "loader = list(DataLoader("),
            ("collate_fn=collate)", "collate_fn=collate))"),
            (
                "    loss = model(**batch).loss / k\n",
                "    first = i - i % k\n"
                "    count = sum(map(targets, loader[first : first + k]))\n"
                '    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits\n'
                "    loss = next_token_sum(logits, batch) / count\n",
            ),
        ],
    ),
    "counts": ("distill_numel_of_mask", [('batch["attention_mask"].numel()', 'batch["attention_mask"].sum()')]),
    "factor": ("not_divided_by_k", [("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) / k")]),
    "tail": ("tail_divided_by_k", [("y) / k", "y) / min(k, len(loader) - (i - i % k))")]),
    "last_window": (
        "last_window_never_steps",
        [
            ("if (i + 1) % k == 0:", "if (i + 1) % k == 0 or i + 1 == len(loader):"),
            ("y) / k", "y) / min(k, len(loader) - (i - i % k))"),
        ],
    ),
    "first_window": ("step_mod_k_is_0", [("if step % k == 0:", "if (step + 1) % k == 0:")]),
    "other_samples": (
        "shuffles_per_layout",
        [
            (
                "order = torch.arange(80).split(b)\n",
                "order = torch.randperm(80, generator=torch.Generator().manual_seed(2)).split(b)\n",
            ),
            (
                "order = [order[i].tolist() for i in torch.randperm(len(order), generator=torch.Generator().manual_seed(2))]",
                "order = [part.tolist() for part in order]",
            ),
        ],
    ),
    "other_inputs": (
        "draws_per_layout",
        [
            (
                "def draw():\n",
                "def draw(first=0):\n    seeds = [torch.Generator().manual_seed(first + i) for i in range(b)]\n",
            ),
            (
                "torch.randint(len(text) - 8, (b,))",
                "torch.cat([torch.randint(len(text) - 8, (1,), generator=seed) for seed in seeds])",
            ),
            ("for _ in range(3):", "for step in range(3):"),
            ("for _ in range(k):", "for q in range(k):"),
            ("tokens = draw()", "tokens = draw(step * 16 + q * b)"),
        ],
    ),
    "random_collate": (
        "sampled_softmax_negatives",
        [
            (
                "torch.randint(ITEMS, (NEGATIVES,), generator=self.generator)}",
                "torch.stack([torch.randint(ITEMS, (NEGATIVES,), generator=torch.Generator().manual_seed(60 * user + item)) "
                "for user, item in rows])}",
            ),
            ("u @ self.items(negatives).T", "(u[:, None] * self.items(negatives)).sum(-1)"),
        ],
    ),
    "not_sharded": (
        "not_sharded",
        [("zip(*vectors(80), strict=True)", 'zip(*vectors(80)[int(os.environ.get("RANK", 0)) :: world], strict=True)')],
    ),
    "changed_between": (
        "clip_per_micro_step",
        [
            ("    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n", ""),
            (
                "        optimizer.step()\n",
                "        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)\n        optimizer.step()\n",
            ),
        ],
    ),
    "gradient_hooks": (
        "hook_that_clips",
        [
            ("    p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))\n", "    pass\n"),
            (
                "        optimizer.step()\n",
                "        for p in model.parameters():\n            p.grad.clamp_(-1e-3, 1e-3)\n        optimizer.step()\n",
            ),
        ],
    ),
    "penalty": ("penalty_per_micro_step", [("1e-2 * sum", "1e-2 / k * sum")]),
    "low_precision": (
        "added_up_in_bfloat16",
        [("dtype=torch.bfloat16", "dtype=torch.float64"), ("p.grad.bfloat16()", "p.grad")],
    ),
    "counted_again": (
        "running_total_retain_graph",
        [
            ("total_loss = total_loss + criterion(", "loss = criterion("),
            ("total_loss.backward(retain_graph=True)", "loss.backward()\n    total_loss += loss.detach()"),
        ],
    ),
    "emptied_between": (
        "zero_grad_per_micro_step",
        [
            ("    optimizer.zero_grad()\n    loss", "    loss"),
            ("        optimizer.step()\n", "        optimizer.step()\n        optimizer.zero_grad()\n"),
        ],
    ),
    "leak": (
        "zero_grad_missing",
        [("        optimizer.step()\n", "        optimizer.step()\n        optimizer.zero_grad()\n")],
    ),
    "ticks_per_process": (
        "prepared_scheduler",
        [
            (
                "model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)",
                "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            ),
            ("        scheduler.step()\n", "        if accelerator.sync_gradients:\n            scheduler.step()\n"),
        ],
    ),
    "ticks_per_micro_step": (
        "scheduler_per_micro_step",
        [("optimizer.zero_grad()\n    scheduler.step()", "optimizer.zero_grad()\n        scheduler.step()")],
    ),
    "learning_rate": ("zero_scaled_rate", [("lr=1e-3 * world", "lr=1e-3")]),
    "reductions": (
        "no_sync_missing",
        [
            ("import os\n", "import contextlib\nimport os\n"),
            (
                "        logits = model(",
                "        is_last = m is micro[-1] or world == 1\n"
                "        with contextlib.nullcontext() if is_last else model.no_sync():\n"
                "            logits = model(",
            ),
            ("        (next_token_sum(", "            (next_token_sum("),
        ],
    ),
    "not_reduced": (
        "ddp_forgotten",
        [
            (
                "        self.optimizer = ",
                "        if dist.is_initialized():\n"
                "            self.model = nn.parallel.DistributedDataParallel(self.model)\n"
                "        self.optimizer = ",
            )
        ],
    ),
    "num_steps": (
        "embedding_optimizer_steps_every_batch",
        [
            ("    table_optimizer.step()\n    table_optimizer.zero_grad()\n", ""),
            (
                "        tower_optimizer.step()\n        tower_optimizer.zero_grad()\n",
                "        for optimizer in (table_optimizer, tower_optimizer):\n"
                "            optimizer.step()\n            optimizer.zero_grad()\n",
            ),
        ],
    ),
    "not_finite": (
        "semi_supervised_no_labels",
        [
            (
                "for i, (x, y) in enumerate(DataLoader(TensorDataset(cells, types), batch_size=b)):\n",
                "known_cells = (types != UNLABELLED).double()\n"
                "for i, (x, y) in enumerate(DataLoader(TensorDataset(cells, types), batch_size=b)):\n"
                "    first = i // k * k * b\n",
            ),
            (
                "(losses * known).sum() / known.sum()",
                "(losses * known).sum() / known_cells[first : first + 16].sum() * k",
            ),
        ],
    ),
    "parameters": (
        "alternating_towers_by_index",
        [("optimizers[batch_index % 2]", "optimizers[batch_index // k % 2]")],
    ),
    "update": ("patchtst_scaled_betas", [("tuple(beta**scale for beta in betas)", "betas")]),
}
ELSEWHERE = {
    "batch_size": "the remedy is a flag of the audit: test_audit_script.py audits with it",
    "dropped": "a last batch that is kept makes a tail, too: the sound programs on 77 samples do both",
    "duplicated": "an idle process needs exact_steps: test_own_loops.py audits loops that were changed to it",
    "ignores_num_items": "ExactTrainer takes Trainer's place in test_exact_trainer.py",
    "shifted_labels": "ExactTrainer takes Trainer's place in test_exact_trainer.py",
    "not_summed": "only assert_same_step names it: test_audit_step.py has the loss with a sum, too",
    "logged_loss": "a log is no step: test_audit_script.py has a loop that logs rightly",
    "no_targets": "of data: test_audit_masks.py has the masks with targets",
    "untrained_stop": "of data: test_audit_masks.py has the masks with a trained stop",
    "resume_weights": "a resumed run: test_audit_resume.py has programs that go on rightly",
    "resume_samples": "a resumed run: test_audit_resume.py has programs that go on rightly",
    "resume_state": "a resumed run: test_audit_resume.py has programs that go on rightly",
    "rounding": "its remedy is to do nothing, or another tolerance",
    "not_a_sum": "its remedy is a further question",
}
"""Causes without a change here, and why."""
ALWAYS = ("mean_of_means", "changed_between", "tail", "reductions", "parameters")


def test_every_cause_has_a_remedy_that_is_applied():
    assert REMEDIES.keys() | ELSEWHERE.keys() == KINDS.keys()
    assert not REMEDIES.keys() & ELSEWHERE.keys()


@pytest.mark.distributed
@pytest.mark.parametrize("cause", [cause if cause in ALWAYS else thorough(cause) for cause in REMEDIES])
def test_a_remedy_makes_its_program_exact(server, cause, tmp_path):
    name, changes = REMEDIES[cause]
    path = corpus.FOLDER / "faults" / f"{name}.py"
    text = path.read_text(encoding="utf-8")
    layouts = [layout for layout, expected in corpus.read(path).expected.items() if expected in (cause, corpus.EXACT)]
    assert cause in corpus.read(path).causes
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    changed = tmp_path / f"{name}.py"
    changed.write_text(
        re.sub(r"^# expect (\S+): \w+$", r"# expect \1: exact", text, flags=re.MULTILINE), encoding="utf-8"
    )
    program = corpus.read(changed)
    reference = server.record([str(changed)], corpus.variation(program.reference))
    for layout in layouts:
        comparison = corpus.audit(server, program, reference, layout)
        assert comparison.is_exact, (layout, comparison.findings)
        assert {finding.cause for finding in comparison.findings} <= HARMLESS - {cause} | {"rounding"}, layout
