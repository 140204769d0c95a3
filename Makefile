# Every target builds .venv first if it is missing. PYTHON: which Python (3.11 or newer) builds it.
PYTHON ?= python3
BIN := .venv/bin
# bf16 where the CPU computes in it, fp32 elsewhere. The step is the same, up to rounding.
PRECISION ?= $(shell grep -qsm1 avx512_bf16 /proc/cpuinfo && echo bf16 || echo no)
# What bench-device writes.
OUTPUT ?= mine.yaml
# On a terminal pip shows its progress in place; a log has the lines of the stages.
PIP_INSTALL = $(BIN)/pip install --disable-pip-version-check $$(test -t 1 || echo --quiet)
IN_PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv pretrain pretrain-gpt2 finetune finetune-lm train-digits train-captcha test test-fast test-thorough test-kinds check bench bench-images bench-finetuning bench-batch-norm bench-loops bench-shakespeare bench-timing bench-device proof-gpu bench-scaling bench-memory bench-language bench-accumulation bench-loader bench-linear bench-choices bench-stability bench-startup bench-templates bench-verdicts bench-packages bench-own-loops bench-noise bench-chat-grid bench-sharding bench-chats bench-noise-scale bench-advise bench-ramp bench-communication bench-modern bench-muon bench-reproducible docs claims test-studies audit audit-peers chaos bench-replicas chaos-machines figures site types release

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | grep -v '^bench' | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "Measurements for those who change something:"
	@grep -hE '^bench[a-z0-9-]*:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

venv: .venv/installed ## build .venv from requirements.txt

.venv/installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("ERROR: Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Building .venv: 2 GB of packages (several more where torch brings CUDA), some minutes"
	$(PYTHON) -m venv .venv
	@echo "1 of 3: torch"
	$(PIP_INSTALL) $$(grep '^torch==' requirements.txt)
	@echo "2 of 3: all else in requirements.txt"
	$(PIP_INSTALL) --requirement requirements.txt
	@echo "3 of 3: this repository"
	$(PIP_INSTALL) --no-deps --editable .
	@touch $@

pretrain: venv ## pretrain a small BERT on Python's documentation: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/pretrain_bert.py --recipe bert_small_cpu --per_device_train_batch_size 16 --eval_steps 240 \
		--output_dir runs/bert_small_cpu --overwrite_output_dir

pretrain-gpt2: venv ## pretrain a small GPT-2 on Python's documentation: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/pretrain_gpt2.py --recipe gpt2_small_cpu --eval_steps 200 --sample_prompt "The function returns" \
		--output_dir runs/gpt2_small_cpu --overwrite_output_dir

train-digits: venv ## train a small ResNet on handwritten digits: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/train_image_classifier.py --recipe resnet_digits_cpu --eval_steps 135 \
		--output_dir runs/resnet_digits_cpu --overwrite_output_dir

train-captcha: venv ## draw captchas and learn to read them: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/train_captcha.py --recipe captcha_cpu --eval_steps 141 \
		--output_dir runs/captcha_cpu --overwrite_output_dir

finetune: venv ## fine-tune a small BERT to tell parts of Python's documentation apart: at most 4 minutes on 2 cores
	@test -f runs/bert_small_cpu/model.safetensors || echo "No runs/bert_small_cpu of make pretrain: starting from random weights"
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/finetune_classifier.py --recipe finetune_small_cpu --eval_steps 89 \
		$$(test -f runs/bert_small_cpu/model.safetensors && echo --model_name_or_path runs/bert_small_cpu) \
		--output_dir runs/finetune_small_cpu --overwrite_output_dir

finetune-lm: venv ## teach a tiny Llama to answer drawn questions: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/finetune_causal_lm.py --recipe sft_small_cpu --eval_steps 450 --num_generations 500 --generation_length 24 \
		--output_dir runs/sft_small_cpu --overwrite_output_dir

test: venv check ## all tests, offline: about 11 minutes on 2 cores
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: venv ## the tests that launch no processes
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not distributed"

test-thorough: venv ## the cases that make test leaves out, as others of their kind are in it: minutes
	$(BIN)/python -m pytest $(IN_PARALLEL) -m thorough

test-kinds: venv ## the tests as on other kinds of machine: hours; FLAGS="--only busy,threads-2 tests/test_kernels.py"
	$(BIN)/python .ci/kinds.py $(FLAGS)

check: venv types ## lint, formatting and types: seconds
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv ## check types: strictly where there is no torch
	$(BIN)/mypy

release: venv ## build wheel and sdist into dist/, check them, try them in a fresh environment: minutes, 2 GB, needs the network
	$(BIN)/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	$(BIN)/python .ci/release.py

bench: venv ## training speed beside Trainer, Accelerate's loop and Lightning: hours; FLAGS="--rounds 2"; writes benchmarks/results/bench.*
	$(BIN)/python benchmarks/run.py $(FLAGS)

bench-images: venv ## images per second beside a plain loop and transformers' Trainer; writes benchmarks/results/images.*
	$(BIN)/python benchmarks/images.py

bench-reproducible: venv ## is a reproducible run the same to the bit on 1 to 5 processes, and what does it cost: about an hour
	$(BIN)/python benchmarks/reproducible.py $(FLAGS)

bench-chat-grid: venv ## is a step of a language model the same in every cut, 4 shapes, 7 objectives, full and LoRA: 10 minutes
	$(BIN)/python benchmarks/chat_grid.py $(FLAGS)

bench-finetuning: venv ## accuracy on film reviews however the step is cut: TRAIN_FILE=reviews.csv
	$(BIN)/python benchmarks/finetuning.py --train_file $(TRAIN_FILE)

bench-batch-norm: venv ## what cutting batch normalisation does, and what exactness costs; writes docs/exactness.md, too
	$(BIN)/python benchmarks/batch_norm.py

bench-loops: venv ## measure documented loops beside the exact step; writes benchmarks/results/loops.*
	$(BIN)/python benchmarks/loops.py

bench-shakespeare: venv ## train nanoGPT and ours on tiny Shakespeare: NANOGPT=a checkout TRAIN_FILE=its text
	$(BIN)/python benchmarks/shakespeare.py --nanogpt $(NANOGPT) --train_file $(TRAIN_FILE)

bench-timing: venv ## predict published throughputs, fit the planner's constants; writes benchmarks/results/timing.*
	$(BIN)/python benchmarks/timing.py
	$(BIN)/python benchmarks/language_models.py

bench-device: venv ## measure this CPU, or these GPUs; writes a device file for `plan --on`: OUTPUT=mine.yaml
	$(BIN)/python benchmarks/device.py --output $(OUTPUT)

proof-gpu: ## prove the recipes on one NVIDIA GPU: at most 25 minutes, no download, resumable; FLAGS=--tiny rehearses it; writes docs/gpu.md
	$(if $(wildcard .venv/installed),$(BIN)/python,$(PYTHON)) benchmarks/proof_gpu.py $(FLAGS)

bench-scaling: venv ## predict communication of 1 to 4 processes beside real runs; writes benchmarks/results/scaling.*
	$(BIN)/python benchmarks/scaling.py

bench-memory: venv ## compare planned with traced memory, every model of the catalog; writes benchmarks/results/memory.*
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/language_models.py

bench-language: venv ## plan published trainings of language models; writes benchmarks/results/language_models.*
	$(BIN)/python benchmarks/language_models.py

bench-sharding: venv ## gradients and memory of sharded weights on two and three processes; writes benchmarks/results/sharding.*
	$(BIN)/python benchmarks/sharding.py

bench-accumulation: venv ## memory and time of accumulation in the optimizer; writes benchmarks/results/accumulation.*
	$(BIN)/python benchmarks/accumulation.py

bench-loader: venv ## what loaders deliver beside what models take, and their memory; writes benchmarks/results/loader.*
	$(BIN)/python benchmarks/loader.py --precision $(PRECISION)

bench-linear: venv ## time of a step and memory over k = 1 to 64 micro-batches; writes benchmarks/results/linear.*
	$(BIN)/python benchmarks/linear.py

bench-choices: venv ## loss curves of --speed auto beside those of safe; writes benchmarks/results/choices.*
	$(BIN)/python benchmarks/choices.py

bench-stability: venv ## results of CPU recipes over roundings and seeds: hours, resumable; writes benchmarks/results/stability.*
	$(BIN)/python benchmarks/stability.py

bench-startup: venv ## seconds from the command to the end of the first step, by stages; writes benchmarks/results/startup.*
	$(BIN)/python benchmarks/startup.py --precision $(PRECISION)

bench-chats: venv ## speed and memory of fine-tuning beside TRL and Trainer: 15 minutes; FLAGS="--rounds 5"; writes benchmarks/results/chats.*
	$(BIN)/python benchmarks/chats.py $(FLAGS)

bench-replicas: venv ## cost of --fault_tolerance step beside DistributedDataParallel; writes benchmarks/results/fault_tolerance.*
	$(BIN)/python benchmarks/fault_tolerance.py --only overhead $(FLAGS)

bench-noise: venv ## dropout by sample beside random numbers and torch's; FLAGS="--only cost"; writes benchmarks/results/noise.*
	$(BIN)/python benchmarks/noise.py $(FLAGS)

bench-noise-scale: venv ## do intervals of the gradient noise scale cover the truth, and what does measuring cost: an hour
	$(BIN)/python benchmarks/noise_scale.py $(FLAGS)

bench-advise: venv ## train what `advise` says beside the recipe and twice that batch, 5 seeds: half an hour, resumable
	$(BIN)/python benchmarks/advise.py $(FLAGS)

bench-ramp: venv ## does a batch that grows reach the loss in fewer steps, and the same curve wherever resumed: an hour
	$(BIN)/python benchmarks/ramp.py $(FLAGS)

bench-communication: venv ## loss and bytes of LocalSGD, DiLoCo, PowerSGD, top-k, 16 bits, 5 seeds: an hour, resumable
	$(BIN)/python benchmarks/communication.py $(FLAGS)

bench-modern: venv ## how much sooner recipes of today reach the classics' losses, 5 seeds: an hour, resumable: NANOGPT= TRAIN_FILE=
	$(BIN)/python benchmarks/modern.py --nanogpt $(NANOGPT) --train_file $(TRAIN_FILE) --precision $(PRECISION) $(FLAGS)

bench-muon: venv ## what Muon's orthogonalization does to rounding, and costs: 5 minutes; writes docs/optimizers.md, too
	$(BIN)/python benchmarks/muon.py

docs: venv ## write what is generated of README.md and docs/: tables of results and plans, fields of recipes, public names
	$(BIN)/python docs/reference.py

figures: venv ## train a tiny recipe on 1, 2 and 3 processes and the documented loop: 3 minutes; writes docs/curve-*.svg
	$(BIN)/python benchmarks/figures.py

.venv-docs/installed: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/pip install --quiet --disable-pip-version-check --requirement requirements-docs.txt
	@touch $@

site: .venv-docs/installed ## build docs/ as pages in site/, without a network; a broken link fails
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "python -m http.server --directory site"

claims: venv ## test common claims about gradient accumulation, 5 seeds each: an hour on 2 cores, resumable; writes studies/claims/claims.md
	$(BIN)/python studies/claims/study.py --jobs 2

test-studies: venv ## the tests of studies/, which make test leaves out
	$(BIN)/python -m pytest studies

audit: venv ## audit every script of this repository on tiny models, several layouts; writes benchmarks/results/audit.*
	$(BIN)/python benchmarks/audit.py

audit-peers: venv ## audit loops that people use, as their installed packages document them: 5 minutes; writes docs/audited.md
	$(BIN)/python benchmarks/audited.py

bench-own-loops: venv ## speed of loops of others, made exact, beside the loops as they were; writes benchmarks/results/own_loops.*
	$(BIN)/python benchmarks/own_loops.py

bench-templates: venv ## which tokens are trained with the chat templates of released models: 1 minute; writes benchmarks/results/templates.*, docs/language-models.md
	$(BIN)/python benchmarks/templates.py $(FLAGS)

bench-verdicts: venv ## how often the audit is right: all programs of tests/audited; writes benchmarks/results/verdicts.*, docs/audit.md
	$(BIN)/python benchmarks/verdicts.py

bench-packages: venv ## audit trainers as they are installed beside a plain computation; writes benchmarks/results/packages.*
	$(BIN)/python benchmarks/packages.py

chaos: venv ## kill runs and replicas at random moments, damage checkpoints, give fields, files of runs and requests odd values; writes results/reliability.*, fault_tolerance.*, bounds.*
	$(BIN)/python benchmarks/reliability.py
	$(BIN)/python benchmarks/fault_tolerance.py --fresh --only chaos
	$(BIN)/python benchmarks/bounds.py

chaos-machines: venv ## kill, freeze, stop and start machines while a run trains on them: an hour; writes benchmarks/results/machines.*
	$(BIN)/python benchmarks/machines.py $(FLAGS)
