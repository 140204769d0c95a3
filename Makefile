# Every target builds .venv first if it is missing. PYTHON: which Python (3.11 or newer) builds it.
PYTHON ?= python3
BIN := .venv/bin
# bf16 where the CPU computes in it, fp32 elsewhere. The step is the same, up to rounding.
PRECISION ?= $(shell grep -qsm1 avx512_bf16 /proc/cpuinfo && echo bf16 || echo no)
# What `make bench` measures.
NAME ?= bench
# On a terminal pip shows its progress in place; a log has the lines of the stages.
PIP_INSTALL = $(BIN)/pip install --disable-pip-version-check $$(test -t 1 || echo --quiet)
IN_PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal

.DEFAULT_GOAL := help
.PHONY: help venv pretrain pretrain-gpt2 finetune finetune-lm train-digits train-captcha train-embeddings finetune-seq2seq finetune-speech finetune-images test test-fast test-core test-thorough test-kinds check bench proof-gpu docs prose claims test-studies audit chaos figures site types release sizes

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "Measurements for those who change something, as make bench NAME=chats FLAGS=--help, which says more:"
	@for file in $$(grep -l '    make bench' benchmarks/*.py); do \
		printf "  %-16s %s\n" "$$(basename $$file .py)" "$$(sed -n '1s/^"""//p' $$file)"; done

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

train-embeddings: venv ## learn to find what belongs to a sentence of Python's documentation: at most 5 minutes on 2 cores
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/train_embeddings.py --recipe embeddings_small_cpu --per_device_train_batch_size 32 --eval_steps 27 \
		--output_dir runs/embeddings_small_cpu --overwrite_output_dir

finetune-seq2seq: venv ## learn to write dates and numbers in words as digits: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/finetune_seq2seq.py --recipe seq2seq_small_cpu --per_device_train_batch_size 32 --eval_steps 1000 \
		--num_generations 500 --output_dir runs/seq2seq_small_cpu --overwrite_output_dir

finetune-images: venv ## teach a tiny LLaVA to answer questions about drawn images: minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/finetune_causal_lm.py --recipe vlm_small_cpu --eval_steps 600 --num_generations 300 --generation_length 16 \
		--output_dir runs/vlm_small_cpu --overwrite_output_dir

finetune-speech: venv ## draw spoken digits and learn to write them: at most 5 minutes on 2 cores, no download
	$(BIN)/accelerate launch --quiet --config_file accelerate_configs/cpu.yaml --mixed_precision $(PRECISION) \
		scripts/finetune_seq2seq.py --recipe speech_small_cpu --eval_steps 219 --num_generations 500 \
		--generation_metrics word_error_rate exact_match --output_dir runs/speech_small_cpu --overwrite_output_dir

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

test: venv check ## all tests, offline: 12 to 22 minutes on 2 cores, by their kind
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: venv ## the tests that launch no processes
	$(BIN)/python -m pytest $(IN_PARALLEL) -m "not distributed"

test-core: venv ## the tests without stepplan/ and samestep/contrib/, which can be deleted; FLAGS="-x tests/test_run.py"
	$(BIN)/python tests/without_rooms.py $(IN_PARALLEL) $(FLAGS)

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

bench: venv ## measure: NAME=chats FLAGS="--rounds 5"; without a name training speed beside other programs, hours; make help has the names
	@for name in $(NAME); do \
		test -f benchmarks/$$name.py || { echo "ERROR: there is no benchmark $$name: make help lists their names" >&2; exit 2; }; \
		echo "$(BIN)/python benchmarks/$$name.py" $(FLAGS); $(BIN)/python benchmarks/$$name.py $(FLAGS) || exit; done

# Targets until 0.1 whose benchmark has another name than theirs.
NEW_language := language_models
NEW_replicas := fault_tolerance FLAGS="--only overhead"
NEW_timing := "timing language_models"
bench-%:
	@echo 'ERROR: make $@ is now: make bench NAME=$(or $(NEW_$*),$(subst -,_,$*)); make help lists the names' >&2; exit 2

proof-gpu: ## prove the recipes on one NVIDIA GPU: at most 25 minutes, no download, resumable; FLAGS=--tiny rehearses it; writes docs/gpu.md
	$(if $(wildcard .venv/installed),$(BIN)/python,$(PYTHON)) benchmarks/proof_gpu.py $(FLAGS)

prose: venv ## find sentences and pages of README and docs/, and messages of the programs, that are too long
	$(BIN)/python docs/prose.py
	$(BIN)/python docs/strings.py --long

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

sizes: ## lines of Python of each room
	@find samestep -name '*.py' -not -path '*/contrib/*' | xargs cat | wc -l | xargs echo "samestep without contrib"
	@for room in samestep/contrib stepplan stepaudit recipes scripts; do find $$room -name '*.py' | xargs cat | wc -l | xargs echo "$$room"; done

claims: venv ## test common claims about gradient accumulation, 5 seeds each: an hour on 2 cores, resumable; writes studies/claims/claims.md
	$(BIN)/python studies/claims/study.py --jobs 2

test-studies: venv ## the tests of studies/, which make test leaves out
	$(BIN)/python -m pytest studies

audit: venv ## audit every script of this repository on tiny models, several layouts; writes benchmarks/results/audit.*
	$(BIN)/python benchmarks/audit.py

chaos: venv ## kill runs and replicas at random moments, damage checkpoints, give fields, files of runs and requests odd values; writes results/reliability.*, fault_tolerance.*, bounds.*
	$(BIN)/python benchmarks/reliability.py
	$(BIN)/python benchmarks/fault_tolerance.py --fresh --only chaos
	$(BIN)/python benchmarks/bounds.py
