"""Lists the commands: what answers each, and what it is for, in a line, in its help, by examples."""

import dataclasses

from samestep.recipe.settings import Parser, program_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what answers it, and what the help says of it.

    Attributes:
        answered_by: MODULE:FUNCTION, which takes the words behind the command, and returns the exit code or None; it is
            imported when it is called, and may be of a package that is not installed.
        summary: its line in the list of commands.
        description: above its flags; empty where another package describes it.
        usage: flags that stand in its usage.
        examples: command lines without the program's name.
    """

    answered_by: str
    summary: str
    description: str = ""
    usage: str = ""
    examples: str


COMMANDS = {
    "list": Command(
        answered_by="samestep.cli.catalog:list_recipes",
        summary="list the recipes of the catalog",
        description=(
            "Lists the recipes of the catalog: name, global batch (samples per optimizer step), what it trains. "
            "With words, those that have all of them in this line."
        ),
        examples="list\nlist bert wikipedia",
    ),
    "show": Command(
        answered_by="samestep.cli.catalog:show_recipe",
        summary="show every field of a recipe, also those of the recipes that it extends",
        description=(
            "Shows a recipe of the catalog, or a file, whole: the value of every field, its own and those of the recipes that "
            "it extends. What is printed is a recipe file, too."
        ),
        examples="show gpt2_xl_8xa100",
    ),
    "plan": Command(
        answered_by="stepplan.cli.dispatch:plan",
        summary="plan a recipe, or any model, on hardware: what fits, how the step is cut, how long it takes",
        description=(
            "Plans the training of a recipe, or of a model without one. Says which micro-batch fits, how the step is "
            "cut, memory, seconds per step, learning rate, the command to paste. Needs no GPU and no torch."
        ),
        usage="[--on HARDWARE]",
        examples="""plan bert_large_2080ti --on 1x2080ti
plan gpt2_xl_8xa100 --on 8x3090 --write_config mine.yaml --html plan.html
plan bert_base --on 1x3090,4xt4,8xa100-80 --price_per_hour 0.25,0.35,1.5 --sort time
plan --what_fits 1x3090 --price_per_hour 0.25
plan bert_base --num_processes 3 --per_device_train_batch_size 43
plan --model_name_or_path Qwen/Qwen3-0.6B --seq_len 2048 --global_batch_size 256 --on 4xl4""",
    ),
    "scale": Command(
        answered_by="stepplan.cli.scale:scale",
        summary="put a recipe, or any model, on more and more devices, and see what each adds",
        description=(
            "Puts a recipe, or a model without one, on 1, 2, 4, ... devices: speed, efficiency, waiting for "
            "communication. Needs no GPU and no torch."
        ),
        usage="--on DEVICE",
        examples="""scale gpt2_124m --on a100-80 --up_to 4096 --plot scaling.png
scale bert_base --on t4 --global_batch_size 1024 --json""",
    ),
    "launch": Command(
        answered_by="stepplan.cli.launch:launch",
        summary="write what Slurm, SkyPilot, Kubeflow or torchrun starts a recipe with, and hand it over",
        description=(
            "Writes a job for Slurm, a task for SkyPilot or a TrainJob for Kubeflow. Inside are the plan's launch file "
            "and the command of the recipe's script. Or a shell script for machines that come and go "
            "(torchrun). What follows `--` are flags of the script, --output_dir among them. Started again, it "
            "goes on from the newest checkpoint."
        ),
        usage="--on ENGINE:HARDWARE",
        examples="launch bert_large_phase1 --on slurm:2x8xa100-80 --write phase1.sbatch -- --output_dir /shared/runs/phase1",
    ),
    "show-data": Command(
        answered_by="samestep.contrib.showing.command:show_data",
        summary="show samples of a recipe of texts, chats (with images, too) or speech, with the tokens that are trained",
        description=(
            "Shows samples as the model reads them, the trained tokens marked: underlined on a terminal, else in "
            "[[ ]]. Images are named, on a page shown; of recordings it says the seconds and the rate. "
            "Then how many tokens are trained, how samples end, and how many rows were left out or cut. "
            "--html writes one page about them, with a chart of lengths and the sources, that needs no network."
        ),
        usage="[--num_samples 3]",
        examples="show-data sft_small_cpu --num_samples 2",
    ),
    "chat": Command(
        answered_by="samestep.contrib.chat:chat",
        summary="talk to a fine-tuned language model in the terminal",
        description=(
            "Talks to what a fine-tuning left: the output folder, a checkpoint, an adapter, or a merged model. A line is a "
            "question; the model knows what was said before. It answers up to the token that ends a turn. Ctrl+C stops an "
            "answer, Ctrl+D ends the chat. --once answers one question, for other programs. Exit code 0 fine, 2 bad usage, 130 "
            "an only answer was stopped."
        ),
        examples="""chat runs/chats
chat runs/chats/checkpoint-36 --once "What is 12 plus 30?" --temperature 0.7 --max_new_tokens 100""",
    ),
    "compare": Command(
        answered_by="samestep.contrib.comparing.command:compare",
        summary="find where two runs part: the step, the tensors, by how much, and the settings that differ",
        description=(
            "Compares two output folders to the bit: metrics of every step, digests (--digest_steps) and "
            "checkpoints of both. Says at which step they part, in which tensors, by how much, and in what "
            "settings they differ. Exit code 0 identical, 1 they part, 2 bad usage."
        ),
        examples="compare runs/first runs/second",
    ),
    "watch": Command(
        answered_by="samestep.contrib.watching.command:watch",
        summary="show a run, or two over each other, as a live page in the browser",
        description=(
            "Serves a page about one or two output folders on 127.0.0.1 until Ctrl+C: curves, speed, time left, "
            "events, digests. It reads what the runs write, and needs no network. From another machine: ssh -L "
            "8765:localhost:8765 HOST."
        ),
        examples="watch runs/first",
    ),
    "doctor": Command(
        answered_by="samestep.contrib.doctor.command:doctor",
        summary="say what went wrong in a run: at which step, by what evidence, what to change",
        description=(
            "Reads the output folder of a run, or of transformers' Trainer (trainer_state.json). Tells at most three findings. "
            "They are of the rate, warm-up, divergence, spikes, oscillation, a plateau, dead and exploding layers, clipping, "
            "overfitting, or the order of the data. Layers are measured with --watch_layers 10. Needs no torch. Exit code 0 "
            "nothing was found, 1 something was, 2 bad usage."
        ),
        examples="doctor runs/first\ndoctor runs/first --json",
    ),
    "advise": Command(
        answered_by="samestep.contrib.advice.command:advise",
        summary="advise on a run's global batch, from the noise of its gradient, and change the recipe for it",
        description=(
            "Reads the output folder of a run with --noise_scale_steps. Shows its gradient noise scale over training, "
            "what the global batch could be, what that saves in steps and costs in tokens. Gives the learning rate, "
            "beta2 and weight decay for that batch, too. Exit code 0 fine, 1 not known from what was measured, 2 bad usage."
        ),
        examples="advise runs/first --write_recipe larger.yaml",
    ),
    "check-model": Command(
        answered_by="samestep.contrib.heads.command:check_model",
        summary="check what Trainer's step is with a head of transformers: exact, k times too large, a mean of means",
        description=(
            "Makes a head with random weights and small sizes. Takes two steps with transformers' Trainer in micro-batches, as "
            "it is and made exact, and compares their gradients with plain PyTorch. Says, too, whether samples see each other "
            "in a packed row. Heads for texts, images, videos and speech; seconds, no download for a class or a folder. --all: "
            "every head of the installed transformers in a table, and what its source says where it cannot be run; half an "
            "hour. Exit code 0 Trainer is exact, 1 it is not, 2 bad usage."
        ),
        usage="MODEL ... | --all",
        examples="check-model LlamaForCausalLM\ncheck-model runs/chats",
    ),
    "audit-script": Command(
        answered_by="stepaudit.script:audit_script",
        summary="run a training program under several layouts, and compare the steps that it takes",
        examples='audit-script --processes 1,2 --per_process accum --per_process batch --vary "batch=8,accum=1" '
        '--vary "batch=2,accum=4" -- train.py',
    ),
    "lint": Command(
        answered_by="stepaudit.lint.command:lint",
        summary="read training programs, and point at lines that make the step depend on how the batch is cut",
        examples="lint train.py\nlint scripts --format sarif",
    ),
}


def make_parser(name: str, usage: str) -> Parser:
    """Make the parser of a command, which describes it and shows its examples."""
    command = COMMANDS[name]
    return Parser(f"{program_name()} {name}", usage, description=command.description, epilog=_format_examples(command))


def make_overview() -> Parser:
    """Make the parser that says what commands there are."""
    description = (
        "Plans the training of recipes, and audits training programs: one recipe, the same step on any hardware."
    )
    parser = Parser(program_name(), "COMMAND ...", description=description, epilog=_format_examples(*COMMANDS.values()))
    subparsers = parser.add_subparsers(title="commands (COMMAND --help says more)", metavar="COMMAND")
    for name, command in COMMANDS.items():
        subparsers.add_parser(name, help=command.summary)
    return parser


def _format_examples(*commands: Command) -> str:
    lines = [line for command in commands for line in command.examples.splitlines()]
    return "\n".join(["examples:", *(f"  {program_name()} {line}" for line in lines)])
