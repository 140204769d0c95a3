"""Weights of a sharded training as they are loaded, whole by each process or by rows: their numbers, and the host's memory."""

import json
import os
import threading
import time
from pathlib import Path

import torch
from accelerate import PartialState
from common import fresh_accelerator
from run_sharded import SHARDED, whole

from samestep.errors import exit_code
from samestep.models import pretrained
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe.catalog import load
from samestep.training import checkpoint, launch, sharding, weight_files
from samestep.training.digest import digest_tensor

FIELDS = ("Pss_Anon", "Pss_File")
"""Lines of /proc/self/smaps_rollup: memory of the process's own, and pages of files that it has mapped; of pages that several
processes share, a part each."""


def make_changes(base: Path, **more) -> dict:
    """Change fields of sft_small_cpu, so that it starts from the base in a folder."""
    changes = {"model_name_or_path": str(base), "train_file": ["chats.jsonl"], "num_train_samples": None}
    changes |= {"dataset_name": None, "dataset_config_name": None, "num_validation_samples": None}
    return changes | {"validation_fraction": 0.1, "max_seq_length": 64} | more


class Watch:
    """Notes the most memory of this process, over what it had at the beginning, in bytes by `FIELDS`."""

    def __enter__(self) -> "Watch":
        self.start, self.is_over = self.read(), False
        self.most = dict(self.start)
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.is_over = True
        self.thread.join()
        self.more = {name: self.most[name] - self.start[name] for name in FIELDS}

    def read(self) -> dict[str, int]:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        values = dict(line.split(":", 1) for line in lines)
        return {name: 1024 * int(values[name].split()[0]) for name in FIELDS}

    def look(self) -> None:
        while not self.is_over:
            self.most = {name: max(value, self.most[name]) for name, value in self.read().items()}
            time.sleep(0.01)


def measure(changes: dict, reads_shards: bool, precision: str = "no") -> dict:
    """Load the weights of a recipe, as `network.make_network` does: their digests, the seconds, and the memory it took."""
    os.environ.update(SHARDED)
    fresh_accelerator()
    accelerator = launch.create_accelerator(mixed_precision=precision)
    recipe = load("sft_small_cpu", changes)

    def build():
        return CausalLmSums.from_recipe(recipe)

    def build_empty():
        with pretrained.leave_out_weights():
            return build()

    accelerator.wait_for_everyone()
    start = time.perf_counter()
    with Watch() as watch:
        torch.manual_seed(recipe.seed)
        files = weight_files.find(recipe, build_empty) if reads_shards else None
        model = build() if files is None else files.model
        fingerprint = checkpoint.fingerprint_frozen(model, None if files is None else files.read)
        optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
        groups = sharding.name_groups(optimizer, model)
        model, optimizer = launch.prepare(accelerator, model, optimizer)
        if files is not None:
            files.fill(model, accelerator.device)
            sharding.set_parameters(optimizer, groups, model)
        accelerator.wait_for_everyone()
    seconds, parameters = time.perf_counter() - start, dict(model.named_parameters())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} <= {id(p) for p in parameters.values()}
    digests = {name: digest_tensor(whole(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    num_bytes = sum(4 * parameter.numel() for parameter in parameters.values())
    answer = {"files": files is not None, "digests": digests, "fingerprint": fingerprint, "seconds": seconds}
    return answer | {"more": watch.more, "copy": num_bytes}


def main(folder: str, cases: str) -> None:
    """Load by each of the cases, {name: arguments} in JSON, and leave the results in RANK.json."""
    PartialState.destroy_process_group = lambda *_: None

    def run():
        results = {name: measure(**case) for name, case in json.loads(cases).items()}
        (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(results), encoding="utf-8")

    os._exit(exit_code(run) or 0)
