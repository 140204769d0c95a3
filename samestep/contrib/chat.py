"""Talks to what a fine-tuning of a language model left: `samestep chat`."""

import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.cli.flags import read_folders
from samestep.errors import UsageError, reason
from samestep.recipe import hub
from samestep.recipe.extras import require
from samestep.recipe.pretrained_shape import find_base
from samestep.recipe.reading import check_model_folder, format_name, has_hub_form, read_json
from samestep.recipe.settings import LENGTH, NOT_NEGATIVE, program_name, setting

GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of classes whose head scores the next token."""
INTERRUPTED = 130
"""Exit code of a program that SIGINT ended, as shells have it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Choose what is asked, and how it is answered"""

    base: str | None = setting(
        "folder or name of the model that an adapter is of; none: base/ in its folder or beside it, else the name in "
        "adapter_config.json",
        default=None,
    )
    once: str | None = setting("the only question; none: those that are typed, or the lines of stdin", default=None)
    system: str | None = setting("what the system says first; none: what the template says", default=None)
    max_new_tokens: int = setting("tokens of an answer, at most", LENGTH, default=512)
    temperature: float | None = setting(
        "logits are divided by it before a token is drawn; 0: the likeliest token; none: as generation_config.json says",
        NOT_NEGATIVE,
        default=None,
    )


def chat(argv: list[str]) -> int:
    """Answer questions until there is none left; return the exit code."""
    (folder,), settings = read_folders("chat", "FOLDER [--FLAG VALUE ...]", argv, ChatSettings, (1,))
    require(None, f"{program_name()} chat")
    base = _find_whole_model(folder, settings.base)  # before torch is imported
    with contextlib.suppress(KeyboardInterrupt):
        talk = _Talk(folder, base, settings)
        is_asked = False
        for question in [settings.once] if settings.once is not None else _read_questions():
            talk.answer(question)
            is_asked = True
        if not is_asked and not sys.stdin.isatty():
            raise UsageError(
                f'stdin is empty, so that nothing is asked: {program_name()} chat {folder} --once "a question"'
            )
        return 0
    print()
    return INTERRUPTED if settings.once is not None else 0


def _find_whole_model(folder: str, given: str | None) -> str:
    """Find the folder, or the name, of the whole model of a result: its own, or that of the base of its adapter.

    Args:
        folder: of the result.
        given: the base that was named, by --base.

    Raises:
        UsageError: the folder holds no causal language model that answers, or a base was named for a whole model.
    """
    path, origin = Path(folder).expanduser(), format_name(folder)
    if not path.is_dir():
        raise UsageError(f"{origin} is no folder: give what a fine-tuning left, such as runs/sft_small_cpu")
    check_model_folder(path, origin)
    is_reward = (
        f"{origin} holds a reward model, which scores texts and answers none: give a model of --objective sft or dpo"
    )
    is_adapter = (path / "adapter_config.json").is_file() and not (path / "config.json").exists()
    if given is not None and not is_adapter:
        raise UsageError(f"--base is {format_name(given)}, but {origin} holds no adapter: leave --base out")
    if given is not None and not has_hub_form(given) and not (Path(given).expanduser() / "config.json").is_file():
        raise UsageError(
            f"--base {format_name(given)} holds no model (there is no config.json): give the adapter's base"
        )
    base = given or find_base(folder, more=", or name it: --base FOLDER")
    if base is not None:
        if read_json(path / "adapter_config.json", f"{origin}: adapter_config.json").get("task_type") == "SEQ_CLS":
            raise UsageError(is_reward)
        return base
    if not (path / "config.json").is_file():
        newest = sorted(path.glob("checkpoint-*"), key=lambda entry: (len(entry.name), entry.name))
        parts = [entry.name for entry in path.glob("model-*.safetensors")]
        if newest:
            raise UsageError(f"{origin} holds no finished model yet: {program_name()} chat {newest[-1]}")
        problem = "weights that several processes share, which only a run reads" if parts else "no model"
        raise UsageError(f"{origin} holds {problem} (there is no config.json): give what a fine-tuning left")
    kinds = read_json(path / "config.json", f"{origin}: config.json").get("architectures") or ["?"]
    if "SequenceClassification" in str(kinds[0]):
        raise UsageError(is_reward)
    return folder


def _load_result(folder: str, base: str) -> Any:
    """Load what a fine-tuning left, to generate texts: in the type of its files, on a GPU if there is one.

    Args:
        folder: of a whole model of transformers, or of an adapter of peft's.
        base: folder or name of the whole model: `folder` itself, or that of the adapter's base.

    Raises:
        UsageError: it cannot be loaded, or is no causal language model.
    """
    import torch  # here: it takes seconds
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
    )

    device = "cuda" if torch.cuda.is_available() else "cpu"
    hub.announce(base)
    try:
        config = AutoConfig.from_pretrained(base, trust_remote_code=False)
        name = (config.architectures or [f"{config.model_type}ForCausalLM"])[0]
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not name.endswith(GENERATORS):
            if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
                raise UsageError(
                    f"{folder} holds a {name}, of images and texts, which chat does not take: "
                    'ask it by pipeline("image-text-to-text")'
                )
            raise ValueError(f"it is no causal language model, but a {name}")
        model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype="auto", weights_only=True)
        if folder != base:
            import peft

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of names that peft takes of transformers
                model = peft.PeftModel.from_pretrained(model, folder)
        return model.to(device).eval()
    except UsageError:
        raise
    except Exception as error:  # of any kind: the files were written by others
        subject, remedy = folder, "Give what a fine-tuning left"
        if folder != base:
            subject, remedy = f"{folder}, an adapter of {base},", "If its base is a folder, name it: --base FOLDER"
        raise UsageError(f"{subject} cannot be loaded: {reason(error)}. {remedy}") from None


def _read_questions() -> Iterator[str]:
    """Read the lines that are typed, or those of stdin, until it ends; those without a word are left out."""
    if sys.stdin is None or sys.stdin.closed:
        raise UsageError("stdin is closed, so that nothing can be asked: give --once")
    is_typed = sys.stdin.isatty()
    if is_typed:
        print("Ctrl+C stops an answer, Ctrl+D ends", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_typed else "")
        except EOFError:
            return
        except UnicodeDecodeError:
            raise UsageError(
                "stdin is not text in UTF-8, so that nothing can be asked: write it anew, or give --once"
            ) from None
        if line.strip():
            if not is_typed:  # beside its answer, but not where answers go into a file
                print(f"> {line}", file=sys.stderr, flush=True)
            yield line


class _Talk:
    """A conversation with what a fine-tuning left in a folder, whose whole model is `base`."""

    def __init__(self, folder: str, base: str, settings: ChatSettings):
        from samestep._internals.library_output import quiet_libraries  # here: they import torch
        from samestep.data.chat_templates import Renderer
        from samestep.data.tokenizer import load_tokenizer
        from samestep.models import stop_tokens

        quiet_libraries()
        self.settings, self.folder = settings, folder
        self.tokenizer = load_tokenizer(folder, sys.maxsize, (), "GPT-2")
        if self.tokenizer.chat_template is None:
            raise UsageError(
                f"{format_name(folder)} has no chat template, for it was trained on texts, not on turns: continue a text with "
                f'transformers\' pipeline("text-generation", model="{folder}")'
            )
        self.renderer = Renderer(self.tokenizer, "assistant", has_turns=True)
        self.model = _load_result(folder, base)
        file = Path(folder).expanduser() / "generation_config.json"
        saved = [read_json(file, "generation_config.json").get("eos_token_id")] if file.is_file() else []
        own = [self.tokenizer.eos_token_id]
        with contextlib.suppress(UsageError):  # of an earlier version, whose file has the base's tokens only
            own.append(self.tokenizer.convert_tokens_to_ids(self.renderer.find_end_token()))
        ends = [*stop_tokens.list_ends(self.model.generation_config), *_flatten(saved), *own]
        self.ends = list(dict.fromkeys(end for end in ends if end is not None))
        self.system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        self.turns: list[dict[str, str]] = []

    def answer(self, question: str) -> None:
        """Write the answer to a question, word by word, and keep both."""
        import torch
        from transformers import TextStreamer

        parts: list[str] = []

        class Streamer(TextStreamer):
            """Writes the words of an answer when they are known, and keeps them."""

            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                parts.append(text)
                super().on_finalized_text(text, stream_end)

        self.turns.append({"role": "user", "content": question})
        tokens = self._encode()
        options: dict[str, Any] = {"max_new_tokens": self._count_places(tokens)}
        if self.settings.temperature is not None:
            options["do_sample"] = self.settings.temperature > 0
            options |= {"temperature": self.settings.temperature} if self.settings.temperature else {}
        try:
            self.model.generate(
                torch.tensor([tokens], device=self.model.device),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.int64, device=self.model.device),
                streamer=Streamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
                eos_token_id=self.ends or None,
                pad_token_id=self.tokenizer.pad_token_id or next(iter(self.ends), None),
                **options,
            )
        except KeyboardInterrupt:
            if self.settings.once is not None:
                raise
            print(" ...", flush=True)
        self.turns.append({"role": "assistant", "content": "".join(parts).strip()})

    def _count_places(self, tokens: list[int]) -> int:
        """Count the tokens that an answer may have."""
        num_positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        return min(self.settings.max_new_tokens, num_positions - len(tokens))

    def _encode(self) -> list[int]:
        """Return the tokens of the conversation; where the model has no places for all of it, its first turns are left out.

        Raises:
            UsageError: the last question alone is too long, or the template refuses the conversation.
        """
        while True:
            try:
                tokens = self.renderer.encode_question([*self.system, *self.turns])
            except UsageError as error:
                hint = "; leave --system out, if it has no such turn" if self.system else ""
                raise UsageError(f"{reason(error)}{hint}") from None
            if self._count_places(tokens) > 0:
                return tokens
            if len(self.turns) < 3:
                raise UsageError(
                    f"the question has {len(tokens):,} tokens with its beginning, more than the model has positions: shorten it"
                )
            print(
                "the conversation is longer than the model's positions: its first turns are left out", file=sys.stderr
            )
            self.turns = self.turns[2:]


def _flatten(values: list[Any]) -> list[int]:
    return [item for value in values for item in (value if isinstance(value, list) else [value])]
