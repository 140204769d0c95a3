"""Lets a model of sequence to sequence generate held-out targets, and scores them beside the data's."""

import json
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.distributed.fsdp import FSDPModule

from samestep.contrib import text_scores
from samestep.contrib.generation import FILE, gathered_root, make_batches
from samestep.training.parts import Part
from samestep.training.run import Run


class Targets(Part):
    """Lets the model generate targets of held-out sources at each evaluation, the first ones of each origin in turn.

    All processes share the work, but with sharded weights, which each token needs whole. The targets do not depend on the
    number of processes, since what is computed together does not. Process 0 writes them to `FILE` in the output folder.
    """

    def __init__(self, run: Run):
        text_scores.check_installed(run.settings.generation_metrics)
        self.run = run

    def score(self) -> dict[str, float]:
        """Return the scores of the targets that are generated, and of each origin where there are several."""
        run = self.run
        accelerator, settings, (_, source) = run.accelerator, run.settings, run.data
        ids = source.choose_samples(settings.num_generations)
        lengths = [source.draw(0, sample_id).length for sample_id in ids]
        batches = make_batches(lengths, settings.per_device_eval_batch_size, may_pad=True)
        is_sharded = isinstance(run.bare_model, FSDPModule)
        share = batches if is_sharded else batches[accelerator.process_index :: accelerator.num_processes]
        texts = []
        with gathered_root(run.bare_model):
            for places in share:
                texts += zip(places, self._generate([ids[place] for place in places], is_sharded), strict=True)
        generated = dict(gather_object(texts))
        lines = []
        for place, sample_id in enumerate(ids):
            line = {"source": source.sources.describe(sample_id), "generated": generated[place].strip()}
            lines.append(line | {"expected": source.targets[sample_id]["target"].strip()})
        if accelerator.is_main_process:
            written = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (Path(settings.output_dir) / FILE).write_text(written, encoding="utf-8")
        groups = {"": lines}
        for sample_id, line in zip(ids, lines, strict=True) if len(source.source_names) > 1 else ():
            groups.setdefault(f"{source.source_names[source.source_numbers[sample_id]]}/", []).append(line)
        scores = {}
        for prefix, group in groups.items():
            pairs = [line["generated"] for line in group], [line["expected"] for line in group]
            found = text_scores.score(settings.generation_metrics, *pairs)
            scores |= {f"{prefix}{name}": value for name, value in found.items()}
        return scores

    @torch.no_grad()
    def _generate(self, ids: list[int], is_sharded: bool) -> list[str]:
        """Generate the targets of some samples."""
        run, (_, source) = self.run, self.run.data
        model, settings = run.bare_model.seq2seq, run.settings
        batch = source.collate([source.draw(0, sample_id) for sample_id in ids])
        inputs = {model.main_input_name: batch["source"].to(model.device)}
        if batch["source"].is_floating_point():
            inputs = {name: value.to(model.dtype) for name, value in inputs.items()}
        if batch["source_mask"] is not None:
            inputs["attention_mask"] = batch["source_mask"].to(model.device)
        was_training, most = model.training, model.generation_config.max_new_tokens
        model.eval()
        with run.accelerator.autocast():  # the model alone: a spectrogram would be of 16 bits, too
            tokens = model.generate(
                **inputs,
                max_new_tokens=min(settings.generation_length or most, most),
                num_beams=settings.num_beams,
                do_sample=False,
                synced_gpus=is_sharded,
            )
        model.train(was_training)
        return source.tokenizer.batch_decode(tokens.tolist(), skip_special_tokens=True)
