"""Fine-tuning of models of images and text: plain transformers one sample at a time is the oracle; the same step in any cut."""

import base64
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import keep
from common import metrics, samples_of_steps
from compare import check, parameters, relative
from image_bases import FAMILIES, save_image_base
from PIL import Image
from transformers import AutoModelForImageTextToText, pipeline

from samestep import cli
from samestep._internals.image_processors import load_processor
from samestep._internals.transformers_models import attention_kernel
from samestep.data import conversation_rows, conversations, row_images
from samestep.data.builtin import drawn_images
from samestep.data.image_conversations import find_videos
from samestep.errors import UsageError, exit_code
from samestep.models import image_text, sequences, towers
from samestep.pages import find_policy
from samestep.recipe.catalog import load
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning
from samestep.recipe.tasks.conversation_images import IMAGE_SHAPE
from samestep.recipe.tasks.freezing import ROLES

PROGRAM = "finetune_causal_lm"
LOADED = [family for family in FAMILIES if family != "smolvlm"]  # whose processor needs torchvision
BOUNDS = {"gemma3": 2**-20}
"""Relative error of families that compute norms in float32, of 2^-23, in whatever type they are."""
KEPT = ["llava", "qwen2_5_vl"]
NONE = ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE, "dataset_name", "dataset_config_name", *DRAWN_SIZES)
NO_SHAPE = " ".join(f"--{name} none" for name in NONE)
STEPS = (
    "--num_warmup_steps 0 --max_train_steps 3 --global_batch_size 5 --learning_rate_batch_size 5 --weight_decay 0 "
    "--max_grad_norm 1 --dtype float64 --record_samples"
)
NUMBERS = (1, 0, 3, 1, 2, 0, 1, 1, 3, 0, 2)
"""Images of each row."""
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (30, 30, 220)}


def write_rows(folder: Path) -> Path:
    """Write questions about images of several sizes, in parts, and their answers; the second turn of some has one, too."""
    rng, rows = np.random.default_rng(0), []
    for row, number in enumerate(NUMBERS):
        names, parts = [], []
        for place in range(number):
            names.append(list(COLOURS)[int(rng.integers(3))])
            size = tuple(int(side) for side in rng.integers(12, 40, 2))
            pixels = np.clip(np.array(COLOURS[names[-1]]) + rng.integers(-20, 20, (*size, 3)), 0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{row}_{place}.png")
            parts.append({"type": "image", "image": f"{row}_{place}.png"})
        first = parts[:2]
        turns = [{"role": "user", "content": [*first, {"type": "text", "text": "Which colours?" * (row + 1)}]}]
        turns.append({"role": "assistant", "content": " ".join(names[:2]) or "none"})
        if number > 2:
            turns.append({"role": "user", "content": [{"type": "text", "text": "And "}, parts[2]]})
            turns.append({"role": "assistant", "content": names[2]})
        rows.append({"messages": turns})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """base("llava") -> folder of a tiny model, made once."""
    made = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = save_image_base(tmp_path_factory.mktemp("bases") / family, family)
        return made[family]

    return make


@pytest.fixture
def write_flags(rows):
    def write(base: Path, more: str = "") -> str:
        data = f"--train_file {rows} --validation_fraction 0 --images --num_generations 0"
        return f"{STEPS} {NO_SHAPE} --max_seq_length 512 --model_name_or_path {base} {data} {more}"

    return write


@pytest.fixture
def finetune(train, write_flags):
    def run(name: str, base: Path, more: str = "") -> Path:
        return train(name, write_flags(base, more), program=PROGRAM)

    return run


def make_example(processor, row: dict, folder: Path) -> tuple[dict, torch.Tensor]:
    """Make a sample's inputs, and which tokens are trained, by no code of ours: each answer and the token that ends it."""
    turns, images = [dict(turn) for turn in row["messages"]], []
    for turn in turns:
        if isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        images += [Image.open(folder / part["image"]).convert("RGB") for part in turn["content"] if "image" in part]
    render = partial(processor.tokenizer.apply_chat_template, tokenize=False)

    def process(text: str) -> dict:
        shown = images[: text.count(processor.image_token)]
        return processor(text=[text], images=[shown] if shown else None, return_tensors="pt", add_special_tokens=False)

    inputs = process(render(turns))
    tokens = inputs["input_ids"][0]
    is_trained = torch.zeros(len(tokens), dtype=torch.bool)
    for place, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start = process(render(turns[:place], add_generation_prompt=True))["input_ids"].shape[1]
            end = process(render(turns[: place + 1]).rstrip("\n"))["input_ids"].shape[1]
            is_trained[start:end] = True
    return dict(inputs), is_trained


def compute_loss(model, examples: list[tuple[dict, torch.Tensor]]) -> torch.Tensor:
    """Compute the mean loss of the trained tokens of samples, one after the other, from all logits."""
    total, count = 0.0, 0
    for inputs, is_trained in examples:
        inputs = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        places = is_trained[1:]
        total = total + F.cross_entropy(logits[places], inputs["input_ids"][0, 1:][places], reduction="sum")
        count += int(places.sum())
    return total / count


def train_alone(folder: Path, rows: Path, run: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train the steps of a run by plain transformers, one sample at a time; return losses and parameters."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float64)
    processor, lines = load_processor(str(folder)), rows.read_text().splitlines()
    recipe = run / "recipe.yaml"
    assert "weight_decay: 0" in recipe.read_text()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-8, weight_decay=0)
    losses = []
    for (_, samples), line in zip(sorted(samples_of_steps(run).items()), metrics(run), strict=True):
        examples = [make_example(processor, json.loads(lines[number]), rows.parent) for _, number in samples]
        loss = compute_loss(model, examples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = line["learning_rate"]
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("family", keep(LOADED, KEPT))
def test_training_is_that_of_plain_transformers(finetune, base, rows, family):
    """Losses of three steps, and parameters, with samples of 0 to 3 images of several sizes."""
    folder = base(family)
    bound = BOUNDS.get(family, 1e-10)
    run = finetune("run", folder, "--per_device_train_batch_size 2")
    losses, expected = train_alone(folder, rows, run)
    assert [line["loss"] for line in metrics(run)] == pytest.approx(losses, rel=bound)
    trained = dict(AutoModelForImageTextToText.from_pretrained(run, dtype=torch.float64).named_parameters())
    ours = {name: trained[name] for name in expected}
    ours, theirs = (torch.cat([value.flatten() for value in values.values()]) for values in (ours, expected))
    assert relative(ours, theirs.detach()) < bound


@pytest.mark.parametrize("cap", [3, 1])
@pytest.mark.parametrize("family", keep(LOADED, KEPT))
def test_every_cut_is_the_same_step(finetune, base, family, cap):
    more = "--validation_fraction 0.3 --per_device_train_batch_size"
    whole = finetune("whole", base(family), f"{more} 5")
    assert all(line["grad_norm"] > 0 for line in metrics(whole))
    check(finetune("cut", base(family), f"{more} {cap}"), whole, "float32" if family in BOUNDS else "float64")


# ---------------------------------------------------------------------------------------------------------------------
# Samples in one row, without padding


@pytest.mark.parametrize("family", LOADED)
def test_samples_lie_end_to_end_where_they_are_the_same_as_alone(base, rows, family):
    """Tokens of an image of Gemma 3 see each other, which attention in rows does not compute."""
    _, sums = make_sums(base(family), rows)
    assert sums.is_padded == (family == "gemma3")
    words = (
        "are not the same as each alone" if sums.is_padded else "end to end without padding, as 3 of them were the same"
    )
    assert sum(words in note for note in sums.notes) == 1
    text, vision = sums.causal_lm.config.text_config, sums.causal_lm.config.vision_config
    assert attention_kernel(text).startswith(sequences.PREFIX) != sums.is_padded
    assert (attention_kernel(vision) == towers.KERNEL) == ("qwen" in family)
    with sums.own_attention():
        assert attention_kernel(text) == "sdpa"


def mistake_positions(input_ids, mm_token_type_ids, image_grid_thw=None, attention_mask=None, *, own, **_):
    """Find the positions of one sequence, and no positions of several."""
    positions, deltas = own(input_ids, mm_token_type_ids, image_grid_thw, attention_mask=attention_mask)
    return positions * (len(input_ids) == 1), deltas


def refuse_rows(input_ids, own, **more):
    """Find the positions of one sequence, given all that the model gives."""
    if "mm_token_type_ids" not in more:
        raise KeyError("no types")
    return own(input_ids, **more)


@pytest.mark.parametrize(
    ("find", "problem"),
    [
        (mistake_positions, "in a row are not the same as each alone"),
        (refuse_rows, "cannot be computed in a row ("),
    ],
)
def test_samples_that_are_not_the_same_in_a_row_are_padded(base, rows, find, problem):
    """Samples of the data show that positions are wrong there; nothing of the model stays changed."""
    source, _ = make_sums(base("qwen2_5_vl"), rows)
    model = AutoModelForImageTextToText.from_pretrained(base("qwen2_5_vl"))
    model.model.get_rope_index = partial(find, own=model.model.get_rope_index)
    sums = image_text.with_blank(source)(model)
    assert sums.is_padded
    assert any(problem in note and "in a padded row of its own" in note for note in sums.notes), sums.notes
    assert attention_kernel(model.config.text_config) == attention_kernel(model.config.vision_config) == "sdpa"
    assert "forward" not in vars(model.model.visual.patch_embed.proj)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_tower_in_fewer_products_is_the_same(base, rows, family):
    """Features, and the gradient of every weight, of images of several sizes, some of them with several windows."""
    source, _ = make_sums(base(family), rows)
    model = AutoModelForImageTextToText.from_pretrained(base(family), dtype=torch.float64)
    images = source.find_inputs([0, 2, 4])
    tower = model.model.visual

    def compute() -> list[torch.Tensor]:
        tower.zero_grad()
        features = tower(images["pixel_values"].double(), grid_thw=images["image_grid_thw"]).pooler_output
        features.square().sum().backward()
        return [features.detach(), *(p.grad.clone() for p in tower.parameters() if p.grad is not None)]

    own = compute()
    undo = towers.use_large_products(model)
    assert attention_kernel(tower.config) == towers.KERNEL
    for ours, theirs in zip(compute(), own, strict=True):
        assert relative(ours, theirs) < 1e-12 or theirs.norm() < 1e-12  # of a bias of keys, which softmax cancels
    undo()
    assert all(torch.equal(*pair) for pair in zip(compute(), own, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Rows


IMAGE = Image.new("RGB", (20, 30), (10, 20, 30))
ANSWER = {"role": "assistant", "content": "yes"}
URI = "data:image/png;base64,"


def read_rows(file: Path, rows: list[dict], **options) -> list[dict]:
    """Read rows of a .jsonl file in `file`'s folder; return them, or raise the faults."""
    path = file.with_name("some.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = conversation_rows.load_rows([str(path)], takes_images=True, **options)
    assert not table.notes.problems, table.notes.problems
    return [json.loads(row) for row in table.rows["row"]]


FORMS = {
    "parts": {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, "what?"]}, ANSWER]},
    "path": {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}, "what?"]}, ANSWER]},
    "url": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "FILE"}}, "what?"]},
            ANSWER,
        ]
    },
    "llava": {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>what?"}, {"from": "gpt", "value": "yes"}],
    },
    "sharegpt": {"images": ["a.png"], "messages": [{"role": "user", "content": "<image>what?"}, ANSWER]},
    "places": {"images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}, "what?"]}, ANSWER]},
    "question": {"image": "a.png", "question": "what?", "answer": "yes"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_row_is_the_same_turns(rows, form):
    IMAGE.save(rows.with_name("a.png"))
    text = json.dumps(FORMS[form]).replace("FILE", f"file://{rows.with_name('a.png')}")
    (row,) = read_rows(rows, [json.loads(text)])
    parts = [{"type": "image", "image": str(rows.with_name("a.png"))}, {"type": "text", "text": "what?"}]
    assert row["prompt"] == [{"role": "user", "content": parts}]
    assert row["answers"] == [[ANSWER]]


def test_images_of_bytes_are_those_of_their_file(rows):
    IMAGE.save(rows.with_name("a.png"))
    content = rows.with_name("a.png").read_bytes()
    names = [
        row_images.read_image("row", value, None) for value in (content, {"bytes": content, "path": "b.png"}, IMAGE)
    ]
    uri = URI + base64.b64encode(content).decode()
    for name in [*names, row_images.read_image("row", uri, None), str(rows.with_name("a.png"))]:
        assert row_images.open_image(name).tobytes() == IMAGE.tobytes()


def test_several_images_are_placed_in_order(rows):
    turns = [
        {"role": "user", "content": "<image> and <image>?"},
        ANSWER,
        {"role": "user", "content": "<image>"},
        ANSWER,
    ]
    (row,) = read_rows(rows, [{"images": ["1.png", "2.png", "3.png"], "messages": turns}])
    assert [Path(name).name for name in row_images.list_images_of_row(row)] == ["1.png", "2.png", "3.png"]
    assert row_images.list_texts(row["prompt"][0]["content"]) == [" and ", "?"]


FAULTS = {
    "no image": (
        {"messages": [{"role": "user", "content": "<image>?"}, ANSWER]},
        "1 marks <image>, but it has 0 images",
    ),
    "no mark": (
        {"images": ["a.png"], "messages": [{"role": "user", "content": "?"}, ANSWER]},
        "0 marks <image>, but it has 1",
    ),
    "internet": ({"image": "https://a.b/c.png", "question": "?", "answer": "a"}, "is at https://a.b/c.png"),
    "nothing": ({"image": {"bytes": None, "path": None}, "question": "?", "answer": "a"}, "neither path nor bytes"),
    "number": ({"image": 3, "question": "?", "answer": "a"}, "an image is int, must be a path or bytes"),
    "no base64": ({"image": "data:image/png,abc", "question": "?", "answer": "a"}, "data: URI without base64"),
    "video": (
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWER]},
        "but only text and images are trained",
    ),
    "text": ({"text": "a"}, "images is true: give messages"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_whose_images_are_not_clear_is_refused_in_one_line(rows, fault):
    row, expected = FAULTS[fault]
    path = rows.with_name("faults.jsonl")
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    table = conversation_rows.load_rows(
        [str(path)], takes_images=True, train_on="all" if fault == "text" else "assistant"
    )
    (problem,) = table.notes.problems
    assert expected in problem.reason
    assert "\n" not in problem.reason


def test_images_are_named_where_only_text_is_trained(rows):
    path = rows.with_name("faults.jsonl")
    path.write_text(json.dumps(FORMS["parts"]) + "\n" + json.dumps(FORMS["llava"]) + "\n", encoding="utf-8")
    problems = conversation_rows.load_rows([str(path)]).notes.problems
    assert ["set images to true" in problem.reason for problem in problems] == [True, True]


def test_an_image_is_never_cut(finetune, base):
    """A row whose image the cut would reach is left out, and the log says so."""
    folder = finetune("run", base("qwen2_5_vl"), "--max_seq_length 40 --truncation cut --max_train_steps 1")
    reports = json.loads((folder / "all_results.json").read_text())
    assert 0 < reports["train_samples"] < len(NUMBERS)


def test_the_result_answers_about_an_image(finetune, base, rows):
    folder = finetune("run", base("llava"), "--num_generations 3 --generation_length 4 --validation_fraction 0.3")
    lines = [json.loads(line) for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    assert all(Path(name).is_file() for line in lines for name in line["images"]), "what was read wrong can be found"
    assert {line["row"].rpartition(":")[0] for line in lines} == {str(rows)}
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), load_processor(str(folder))
    chat = pipeline("image-text-to-text", model=model, processor=processor)
    parts = [{"type": "image", "path": str(rows.with_name("0_0.png"))}, {"type": "text", "text": "Which colours?"}]
    (answer,) = chat(text=[{"role": "user", "content": parts}], max_new_tokens=4)
    assert answer["generated_text"][-1]["role"] == "assistant"


# ---------------------------------------------------------------------------------------------------------------------
# Several processes


@pytest.mark.parametrize("family", keep(LOADED, ["qwen2_5_vl"]))
def test_two_processes_take_the_same_step(train_on, finetune, write_flags, base, family):
    """Steps of 5 samples, 2 of which have no image, so that some micro-batches of one process alone have none."""
    more = "--validation_fraction 0.3 --per_device_train_batch_size"
    whole = finetune("whole", base(family), f"{more} 5")
    folder = train_on(2, {f"{PROGRAM}/cut": write_flags(base(family), f"{more} 1")})
    check(folder / PROGRAM / "cut", whole, "float32" if family in BOUNDS else "float64")


CUTS = ("4", "3", "2", "1", "3 --gradient_checkpointing")
"""Samples of a micro-batch, beside the whole step's 5."""
ROUNDED = 2**-20
"""Relative error of a step by 3 processes: all families compute norms in float32, also of float64, so that a gradient that is
multiplied by 3, and divided by it, is rounded in them; by 2 it is not."""
WAYS = {"whole": "", "adapters": "--lora_rank 2 --lora_alpha 4"}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", LOADED)
def test_the_grid_of_cuts_and_processes(train_on, finetune, write_flags, base, family, way):
    """Steps of 5, 3 (the rest of an epoch) and 5 samples in 6 cuts; on 1, 2 and 3 processes, of which one may have none, with
    divided weights, and resumed on more."""
    kind, folder = "float32" if family in BOUNDS else "float64", base(family)
    more = f"--validation_fraction 0.3 --epoch_end keep {WAYS[way]} --per_device_train_batch_size"
    few = f"--global_batch_size 2 --learning_rate_batch_size 2 {more}"
    whole, least = finetune("whole", folder, f"{more} 5"), finetune("least", folder, f"{few} 2")
    assert [line["samples"] for line in metrics(whole)] == [5, 3, 5]
    for number, cut in enumerate(CUTS):
        check(finetune(f"cut_{number}", folder, f"{more} {cut}"), whole, kind)
    saving = f"{more} 2 --checkpointing_steps 1 --lr_num_steps 3"
    finetune(f"{PROGRAM}/resumed", folder, f"{saving} --max_train_steps 1")
    saving += " --resume_from_checkpoint latest"
    flags = {"processes": f"{more} 1", "idle": f"{few} 1", "resumed": saving}
    runs = train_on(3, {f"{PROGRAM}/{name}": write_flags(folder, text) for name, text in flags.items()})
    for name, truth in (("processes", whole), ("resumed", whole), ("idle", least)):
        losses = [[line["loss"] for line in metrics(path)] for path in (runs / PROGRAM / name, truth)]
        assert losses[0] == pytest.approx(losses[1], rel=ROUNDED), name
        # AdamW enlarges what is small
        assert relative(parameters(runs / PROGRAM / name), parameters(truth)) < 1e-5, name
    runs = train_on(2, {f"{PROGRAM}/two": write_flags(folder, f"{more} 2")})
    check(runs / PROGRAM / "two", whole, kind)
    runs = train_on(2, {f"{PROGRAM}/sharded": write_flags(folder, f"{more} 1")}, "fsdp2_2xcpu")
    check(runs / PROGRAM / "sharded", whole, kind)


LORA = {
    "language": "--lora_targets language_model.layers.0.self_attn.q_proj language_model.layers.1.mlp.down_proj",
    "projector": "--lora_targets linear_1 linear_2",
    "tower": "--lora_targets fc1 fc2",
    "all": "",
    "dropout": "--lora_dropout 0.5 --lora_targets language_model.layers.0.self_attn.q_proj",
}


@pytest.mark.parametrize("targets", keep(LORA, ["projector", "all", "dropout"]))
def test_adapters_take_the_same_step_in_every_cut(finetune, base, targets):
    more = f"--lora_rank 2 --lora_alpha 4 --validation_fraction 0.3 {LORA[targets]}"
    whole = finetune("whole", base("llava"), f"{more} --per_device_train_batch_size 5")
    assert all(line["grad_norm"] > 0 for line in metrics(whole))
    check(finetune("cut", base("llava"), f"{more} --per_device_train_batch_size 2"), whole, "float64")


def make_sums(base: Path, rows: Path, **changes):
    """Make the data and the model of a run on a base, by the program's own code."""
    fields = dict.fromkeys(NONE) | {"model_name_or_path": str(base), "train_file": [str(rows)]}
    recipe = load("sft_small_cpu", fields | {"images": True, "validation_fraction": 0.0} | changes)
    source, _ = conversations.build(recipe)
    return source, recipe.parts.find("model").from_recipe(recipe, source)


@pytest.mark.parametrize("family", keep(LOADED, ["llava", "qwen3_vl"]))
def test_a_frozen_tower_stays_and_costs_no_gradient(finetune, base, rows, family):
    """The same step in every cut; its projector, which in Qwen is inside of it, and the text are trained."""
    more = "--validation_fraction 0.3 --freeze vision_tower --per_device_train_batch_size"
    whole = finetune("whole", base(family), f"{more} 5")
    check(finetune("cut", base(family), f"{more} 2"), whole, "float32" if family in BOUNDS else "float64")
    source, sums = make_sums(base(family), rows, freeze=["vision_tower"])
    model, saved = sums.causal_lm, []
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    sizes = [(p.numel(), name in frozen) for name, p in model.named_parameters()]
    trained = sum(size for size, is_frozen in sizes if not is_frozen)
    assert f"{trained:,} of {sum(size for size, _ in sizes):,} parameters are trained" in sums.notes
    # What changed in the run: nothing of the tower, something of the projector and of the text
    before, after = (
        dict(AutoModelForImageTextToText.from_pretrained(folder).named_parameters()) for folder in (base(family), whole)
    )
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert frozen
    assert not frozen & changed
    kinds = [{role for role, names in ROLES.items() if set(name.split(".")) & set(names)} for name in changed]
    assert any("projector" in kind for kind in kinds)
    assert any("language_model" in kind for kind in kinds)
    assert all("projector" in kind for kind in kinds if "vision_tower" in kind)
    # No output of a frozen layer has a gradient
    layers = [module for name, module in model.named_modules() if f"{name}.weight" in frozen]
    handles = [
        layer.register_forward_hook(lambda _, __, output: saved.append(output.requires_grad)) for layer in layers
    ]
    batch = {name: value for name, value in source.collate([source.draw(0, 0)]).items() if name != "counts"}
    sums(**batch)[0].sum().backward()
    for handle in handles:
        handle.remove()
    assert saved
    assert not any(saved)
    assert all((p.grad is None) == (name in frozen) for name, p in model.named_parameters())


@pytest.mark.parametrize("family", keep(LOADED, ["llava"]))
def test_adapters_are_only_where_nothing_is_frozen(base, rows, family):
    """On language model, projector or tower, whatever their layers are called."""
    for part in ROLES:
        freeze = [role for role in ROLES if role != part]
        try:
            _, sums = make_sums(base(family), rows, freeze=freeze, lora_rank=2, lora_alpha=4)
        except UsageError:  # the projector of Gemma 3 is one matrix that is no layer
            assert (family, part) == ("gemma3", "projector")
            continue
        names = [name for name, parameter in sums.model.named_parameters() if parameter.requires_grad]
        assert names
        for name in names:
            assert "lora_" in name
            kind = {role for role, others in ROLES.items() if set(name.split(".")) & set(others)}
            assert part in kind
            assert part != "vision_tower" or "projector" not in kind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": ["towr"]}, "freeze names towr, but LlavaForConditionalGeneration has no such module: give some of"),
        ({"freeze": [*ROLES]}, "which is all of the model: leave a part to train"),
    ],
)
def test_what_cannot_be_frozen_is_said_in_one_line(base, rows, changes, message):
    with pytest.raises(UsageError) as raised:
        make_sums(base("llava"), rows, **changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# ---------------------------------------------------------------------------------------------------------------------
# Drawn images, and a model with random weights


@pytest.mark.parametrize("name", ["processor_config.json", "video_preprocessor_config.json"])
def test_the_part_for_videos_is_saved_as_it_was(base, tmp_path, name):
    """It is loaded only where torchvision is, and is not lost on machines without it."""
    folder, videos = tmp_path / "base", {"video_processor_type": "Qwen2VLVideoProcessor", "fps": 2}
    shutil.copytree(base("qwen2_5_vl"), folder)
    path = folder / name
    whole = videos if name.startswith("video") else json.loads(path.read_text()) | {"video_processor": videos}
    path.write_text(json.dumps(whole))
    load_processor(str(folder), find_videos(str(folder))).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "processor_config.json").read_text())["video_processor"] == videos
    again = load_processor(str(tmp_path / "saved"))
    assert type(again) is type(load_processor(str(base("qwen2_5_vl"))))


def test_drawn_images_are_decided_by_seed_and_number():
    chats = [drawn_images.draw_chat(1, "train", number) for number in range(60)]
    assert chats == [drawn_images.draw_chat(1, "train", number) for number in range(60)]
    assert {chat.task for chat in chats} == set(drawn_images.TASKS)
    assert {len(chat.images) for chat in chats} == {1, 2, 3}
    others = [drawn_images.draw_chat(*key) for key in [(1, "validation", 0), (2, "train", 0)]]
    images = [image for chat in [*chats, *others] for image in chat.images]
    assert len(set(images)) == len(images)
    for chat in chats:
        sizes = {row_images.open_image(image).size for image in chat.images}
        assert sizes == {(drawn_images.SIZE, drawn_images.SIZE)}
        if chat.task in ("colours", "figures"):
            assert len(chat.answer.split()) == len(chat.images)


DRAWN = (
    "--recipe vlm_small_cpu --num_train_samples 24 --num_validation_samples 4 --hidden_size 32 --intermediate_size 64 "
    "--num_image_layers 1 --num_hidden_layers 1 --dtype float64 --num_generations 2"
)


def test_a_llava_of_random_weights_takes_the_same_step_in_every_cut(train):
    whole = train("whole", f"{STEPS} {DRAWN} --per_device_train_batch_size 5", program=PROGRAM)
    check(train("cut", f"{STEPS} {DRAWN} --per_device_train_batch_size 2", program=PROGRAM), whole, "float64")
    model, processor = AutoModelForImageTextToText.from_pretrained(whole), load_processor(str(whole))
    assert model.config.image_token_id == processor.image_token_id


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--images false --freeze vision_tower", "but images is false, and of models of texts"),
        ("--architecture llama", "with random weights only llava is made"),
        ("--image_size none", "image_size is null"),
        ("--image_patch_size 7", "image_patch_size 7 does not divide it"),
        ("--images false", "image_size is 32"),
        ("--objective dpo", "objective is dpo, whose pairs are texts"),
        ("--router_loss global --router_loss_weight 0.1", "router_loss is global, which knows rows of texts only"),
    ],
)
def test_recipes_that_cannot_be_are_refused_in_words(flags, problem, train, tmp_path):
    with pytest.raises(UsageError) as raised:
        train("run", f"{DRAWN} {flags}", program=PROGRAM)
    assert any(problem in text for text in raised.value.problems), raised.value.problems


def test_recipes_without_images_have_the_fingerprints_of_earlier_versions():
    for name in ("vlm_small_cpu", "seq2seq_small_cpu"):
        assert "freeze" not in load(name).decisive_fields()
        assert load(name, {"freeze": ["encoder"]}).fingerprint != load(name).fingerprint
    assert not {"images", *IMAGE_SHAPE} & load("sft_small_cpu").decisive_fields().keys()
    assert load("vlm_small_cpu").decisive_fields().keys() >= {"images", *IMAGE_SHAPE}


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_sharded_weights_take_the_same_step(train_on, finetune, write_flags, base, family):
    more = "--validation_fraction 0.3 --per_device_train_batch_size"
    whole = finetune("whole", base(family), f"{more} 5")
    folder = train_on(2, {f"{PROGRAM}/cut": write_flags(base(family), f"{more} 1")}, "fsdp2_2xcpu")
    check(folder / PROGRAM / "cut", whole, "float64")


def test_no_token_of_an_image_is_trained(rows, base):
    """Where all others are."""
    changes = dict.fromkeys(NONE) | {"model_name_or_path": str(base("qwen2_5_vl")), "train_file": [str(rows)]}
    recipe = load("sft_small_cpu", changes | {"images": True, "validation_fraction": 0.0, "train_on": "all"})
    source, _ = conversations.build(recipe)
    for number, num_images in enumerate(NUMBERS):
        sample = source.draw(0, number)
        is_image = np.isin(sample.tokens, list(source.image_ids))
        assert is_image.any() == (num_images > 0)
        assert not (is_image & sample.is_trained).any()
        assert (is_image | sample.is_trained)[1:].all()
        assert source.collate([sample])["counts"].tolist() == [int(sample.is_trained.sum())]


def test_a_resumed_run_on_two_processes_is_the_same(train_on, finetune, write_flags, base, tmp_path):
    more = "--validation_fraction 0.3 --per_device_train_batch_size"
    whole = finetune("whole", base("llava"), f"{more} 5")
    flags = f"{more} 2 --checkpointing_steps 1 --lr_num_steps 3"
    finetune(f"{PROGRAM}/cut", base("llava"), f"{flags} --max_train_steps 1")
    folder = train_on(2, {f"{PROGRAM}/cut": write_flags(base("llava"), f"{flags} --resume_from_checkpoint latest")})
    check(folder / PROGRAM / "cut", whole, "float64")


@pytest.mark.rooms
@pytest.mark.parametrize("family", keep(LOADED, ["llava", "idefics3"]))
def test_samples_are_shown_with_their_images(base, rows, family):
    """Each where it stands in the text, in small on a page; what is trained is text."""
    from samestep.contrib.showing.page import write_page
    from samestep.contrib.showing.texts import read_sequences, show_samples

    source, _ = make_sums(base(family), rows)
    text = "\n".join(show_samples(source, len(NUMBERS)))
    for row, number in enumerate(NUMBERS):
        (sequence,) = read_sequences(source, row, with_copies=True)
        images = [part for part in sequence.parts if part.image]
        assert len(images) == number
        for place, part in enumerate(images):
            with Image.open(rows.parent / f"{row}_{place}.png") as image:
                name = f"image {place + 1}: {row}_{place}.png, {image.width} x {image.height} pixels, "
            assert part.text.startswith(f"[{name}")
            assert not part.is_trained
            assert name in text
        words = "".join(part.text for part in sequence.parts)
        assert words.count("Which colours?") == row + 1
        assert source.processor.image_token not in words
        trained = "".join(part.text for part in sequence.parts if part.is_trained)
        assert trained.count("<|im_end|>") == 1 + (number > 2)
    page = write_page(source.recipe, source, None, len(NUMBERS))
    assert page.count('<img src="data:image/png;base64,') == sum(NUMBERS)
    assert "img-src data:" in find_policy(page)


@pytest.mark.rooms
def test_the_command_shows_images(capsys, tmp_path):
    words = f"show-data vlm_small_cpu --num_train_samples 40 --num_validation_samples 4 --html {tmp_path / 'data.html'}"
    assert exit_code(lambda: cli.main(words.split())) == 0
    assert "wrote " in capsys.readouterr().out
    page = (tmp_path / "data.html").read_text(encoding="utf-8")
    assert page.count("<img ") >= 3
    assert "image 1: in the row, 32 x 32 pixels, 16 tokens" in page
