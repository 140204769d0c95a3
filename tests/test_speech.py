"""Recordings: read, resampled, refused; drawn digits; and the step of Whisper, which is that of single samples."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import torch.nn.functional as F
from cases import thorough
from common import SEQ2SEQ_FROM_FOLDER, metrics
from compare import parameters, relative
from tokenizers import pre_tokenizers
from transformers import (
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from samestep import cli
from samestep.data import audio, seq2seq
from samestep.data.builtin import spoken_digits
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load
from samestep.training.checkpoint import checkpoints, read

NUM, STEPS, RATE = 7, 3, 1e-3
PROGRAM = "finetune_seq2seq"


def encode(sound: np.ndarray, rate: int = audio.RATE, kind: str = "wav", subtype: str = "PCM_16") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=kind.upper(), subtype=subtype)
    return file.getvalue()


def tone(hz: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hz * np.arange(int(rate * seconds)) / rate)


# ---------------------------------------------------------------------------------------------------------------------
# Recordings


@pytest.mark.parametrize("kind", ["wav", "flac"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_a_tone_stays_that_tone(kind, rate):
    """At the model's rate, the mean of all channels."""
    channels = np.stack([tone(440, rate), np.zeros(rate // 2), tone(440, rate)] + [np.zeros(rate // 2)] * 5, 1)
    sound = audio.decode(encode(channels, rate, kind))
    assert sound.dtype == np.float32
    assert len(sound) == pytest.approx(audio.RATE / 2, abs=2)
    spectrum = np.abs(np.fft.rfft(sound))
    assert spectrum.argmax() * audio.RATE / len(sound) == pytest.approx(440, abs=3)
    assert np.abs(sound).max() == pytest.approx(2 / 8 * 0.5, rel=0.05)


WHOLE = encode(tone(440, 16000))


def write_rows(folder: Path, rows: list[dict]) -> Path:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


def build(file: Path, on_bad_row: str = "refuse", **changes):
    changes = {"train_file": [str(file)], "validation_fraction": 0, "max_source_length": 50} | changes
    return seq2seq.build(load("speech_small_cpu", changes), on_bad_row=on_bad_row)[0]


def test_columns_of_recordings(tmp_path):
    (tmp_path / "good.wav").write_bytes(WHOLE)
    for names, changes in ((("audio", "sentence"), {}), (("a", "b"), {"source_column": "a", "target_column": "b"})):
        pairs = build(write_rows(tmp_path, [dict(zip(names, ("good.wav", "one"), strict=True))]), **changes)
        assert pairs.targets[0]["target"] == "one"
    with pytest.raises(
        UsageError, match=r"none of its columns 'a', 'b' is called audio, speech, .* with --source_column"
    ):
        build(write_rows(tmp_path, [{"a": "good.wav", "b": "one"}]))


def test_a_file_that_changed_during_the_run(tmp_path):
    (tmp_path / "good.wav").write_bytes(WHOLE)
    pairs = build(write_rows(tmp_path, [{"audio": "good.wav", "text": "one"}]))
    pairs.collate([pairs.draw(0, 0)])
    (tmp_path / "good.wav").write_bytes(encode(tone(880, 16000)))
    with pytest.raises(UsageError, match=r"good.wav is another file than at the start of the run"):
        pairs.collate([pairs.draw(0, 0)])


def test_bytes_in_a_table(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"audio": [{"bytes": WHOLE, "path": "x.wav"}], "text": ["one"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    pairs = build(tmp_path / "rows.parquet")
    assert np.allclose(pairs.sources.load(0), audio.decode(WHOLE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_source_length": 75}, "max_source_length is 75, but speech is padded to whole seconds of 50"),
        ({"source_prefix": "a"}, "source_prefix is 'a', but modality is speech: leave it empty"),
        ({"modality": "text"}, "modality is text, but builtin/spoken_digits has speech"),
    ],
)
def test_recipes_of_speech_that_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        load("speech_small_cpu", changes)


# ---------------------------------------------------------------------------------------------------------------------
# Drawn digits


def test_drawn_digits():
    """A function of seed and number; no held-out sequence is trained on; digits sound otherwise, whoever speaks."""
    held_out = {spoken_digits.draw_digits(1, "validation", number) for number in range(300)}
    trained = {spoken_digits.draw_digits(1, "train", number) for number in range(300)}
    assert not held_out & trained
    sounds = [spoken_digits.draw_sound(1, "train", number) for number in range(20)]
    assert np.array_equal(sounds[3], spoken_digits.draw_sound(1, "train", 3))
    for sound in sounds:
        assert np.isfinite(sound).all()
        assert 0.2 < np.abs(sound).max() < 1
        assert len(sound) < 2 * audio.RATE


# ---------------------------------------------------------------------------------------------------------------------
# Whisper


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """Recordings with texts, and a folder of a tiny Whisper with random weights, its tokenizer and its extractor."""
    folder = tmp_path_factory.mktemp("whisper")
    rows = []
    for number in range(NUM):
        digits = spoken_digits.draw_digits(3, "train", number)[:3]
        sound = spoken_digits.draw_sound(3, "train", number)[: audio.RATE // (1 + number % 3)]
        (folder / f"{number}.{'flac' if number % 2 else 'wav'}").write_bytes(
            encode(sound, kind="flac" if number % 2 else "wav")
        )
        rows.append({"audio": f"{number}.{'flac' if number % 2 else 'wav'}", "text": spoken_digits.write(digits)})
    file, base = write_rows(folder, rows), folder / "model"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = WhisperTokenizer(vocab={token: n for n, token in enumerate([*alphabet, "<|endoftext|>"])}, merges=[])
    names = ["startoftranscript", *LANGUAGES, "translate", "transcribe", "startoflm", "startofprev", "nocaptions"]
    tokenizer.add_tokens([f"<|{name}|>" for name in [*names, "notimestamps"]], special_tokens=True)
    tokenizer.pad_token = tokenizer.eos_token
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "init_std": 0.1, "dropout": 0.1}
    config = WhisperConfig(
        **sizes,
        **ids,
        bos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=start,
        vocab_size=len(tokenizer),
        max_source_positions=50,
        max_target_positions=40,
        encoder_layerdrop=0.2,
        apply_spec_augment=True,
    )
    torch.manual_seed(5)
    for part in (WhisperForConditionalGeneration(config), tokenizer, WhisperFeatureExtractor(chunk_length=1)):
        part.save_pretrained(base)
    return file, base, rows


def flags(whisper, cut: int, dropout: float = 0.0) -> str:
    file, base, _ = whisper
    return (
        f" --recipe speech_small_cpu --train_file {file} --validation_fraction 0 --model_name_or_path {base} "
        f"--max_source_length 50 --max_target_length 40 --global_batch_size {NUM} --learning_rate_batch_size {NUM} "
        f"--per_device_train_batch_size {cut} --dtype float64 --dropout {dropout} --max_grad_norm none --learning_rate {RATE} "
        f"--max_train_steps {STEPS} --lr_scheduler_type constant --warmup_ratio none --num_warmup_steps 0 --weight_decay 0 "
        f"--source_language german --target_language german{SEQ2SEQ_FROM_FOLDER}"
    )


@pytest.mark.parametrize("counts_forced", [False, thorough(True)])
def test_whisper_takes_the_step_of_single_recordings(train, whisper, counts_forced):
    """As transformers and torch compute it, alone: tokens of language and task are given, or targets."""
    _, base, rows = whisper
    tokenizer, extractor = AutoTokenizer.from_pretrained(base), AutoFeatureExtractor.from_pretrained(base)
    tokenizer.set_prefix_tokens(language="german", task="transcribe", predict_timestamps=False)
    model = WhisperForConditionalGeneration.from_pretrained(base, dtype=torch.float64).eval()
    recipe = load("speech_small_cpu")
    optimizer = torch.optim.AdamW(
        model.parameters(), RATE, (recipe.adam_beta1, recipe.adam_beta2), recipe.adam_epsilon, weight_decay=0
    )
    samples, first = [], 0 if counts_forced else 3
    for row in rows:
        sound, rate = soundfile.read(base.parent / row["audio"], dtype="float32")
        features = extractor(sound, sampling_rate=rate, return_tensors="pt")["input_features"].double()
        labels = torch.tensor(tokenizer(row["text"])["input_ids"])[None, 1:]
        assert tokenizer.convert_ids_to_tokens(labels[0, :3]) == ["<|de|>", "<|transcribe|>", "<|notimestamps|>"]
        samples.append((features, labels))
    num_targets, losses = sum(labels[0, first:].numel() for _, labels in samples), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for features, labels in samples:
            logits = model(input_features=features, labels=labels).logits[0]
            loss = F.cross_entropy(logits[first:], labels[0, first:], reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
    folder = train("whisper", flags(whisper, 3) + f" --count_forced_tokens {counts_forced}".lower(), program=PROGRAM)
    assert [line["loss"] for line in metrics(folder)] == pytest.approx(losses, rel=1e-10)
    saved = read(checkpoints(folder)[-1], "model")
    named = {name.removeprefix("model."): tensor for name, tensor in model.named_parameters(remove_duplicate=False)}
    named |= dict(model.named_parameters(remove_duplicate=False))
    assert named.keys() >= saved.keys()
    ours, theirs = (torch.cat([table[name].flatten().double() for name in saved]) for table in (saved, named))
    assert relative(ours, theirs) < 1e-10
    listen = pipeline("automatic-speech-recognition", model=str(folder), dtype=torch.float32)
    assert isinstance(listen({"raw": sound, "sampling_rate": rate})["text"], str)


@pytest.mark.thorough
def test_noise_of_whisper_is_that_of_the_sample(train, whisper, capsys):
    runs = {
        name: parameters(train(name, flags(whisper, cut, 0.2) + more, program=PROGRAM))
        for name, cut, more in (("whole", NUM, ""), ("cut", 3, ""), ("again", 2, " --gradient_checkpointing"))
    }
    said = capsys.readouterr().out
    assert "encoder_layerdrop 0.2 is set to 0" in said
    assert "apply_spec_augment is set to false" in said
    assert relative(runs["cut"], runs["whole"]) < 1e-10
    assert relative(runs["again"], runs["whole"]) < 1e-10
    assert relative(parameters(train("without", flags(whisper, 3), program=PROGRAM)), runs["whole"]) > 1e-3


@pytest.mark.distributed
@pytest.mark.thorough
def test_whisper_on_two_processes(train_on, train, whisper):
    alone = parameters(train("alone", flags(whisper, 2, 0.1), program=PROGRAM))
    folder = train_on(2, {f"{PROGRAM}/whisper": flags(whisper, 2, 0.1)})
    assert relative(parameters(folder / PROGRAM / "whisper"), alone) < 1e-10


@pytest.mark.distributed
@pytest.mark.thorough
@pytest.mark.parametrize("way", ["", " --lora_rank 2 --lora_alpha 4", " --freeze encoder"])
def test_the_grid_of_whisper(train_on, train, whisper, way):
    """Six cuts of 7 recordings; steps of 5 and 2, and of 2 on 3 processes; divided weights; resumed on more processes."""

    def write(batch: int, cut: int) -> str:
        return flags(whisper, cut).replace(f"batch_size {NUM}", f"batch_size {batch}") + f" --epoch_end keep{way}"

    every = train("every", write(NUM, NUM), program=PROGRAM)
    for cut in (5, 4, 3, 2, 1):
        assert relative(parameters(train(f"cut_{cut}", write(NUM, cut), program=PROGRAM)), parameters(every)) < 1e-12
    whole, least = (train(f"of_{batch}", write(batch, batch), program=PROGRAM) for batch in (5, 2))
    assert [line["samples"] for line in metrics(whole)] == [5, 2, 5]
    saving = f"{write(5, 2)} --checkpointing_steps 1"
    train(f"{PROGRAM}/resumed", f"{saving} --stop_after_step 1", program=PROGRAM)
    runs = {"processes": write(5, 1), "idle": write(2, 1), "resumed": f"{saving} --resume_from_checkpoint latest"}
    folder = train_on(3, {f"{PROGRAM}/{key}": more for key, more in runs.items()}) / PROGRAM
    for key, truth in (("processes", whole), ("resumed", whole), ("idle", least)):
        assert relative(parameters(folder / key), parameters(truth)) < 1e-12, key
    folder = train_on(2, {f"{PROGRAM}/sharded": write(5, 2)}, "fsdp2_2xcpu") / PROGRAM
    assert relative(parameters(folder / "sharded"), parameters(whole)) < 1e-12


@pytest.mark.rooms
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_is_left_listens(train, precision, monkeypatch):
    """By transformers alone, with the texts of the last evaluation, which computes spectrograms in float32 always."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    more = (
        " --recipe speech_small_cpu --num_train_samples 20 --num_validation_samples 4 --max_source_length 100 --hidden_size 16 "
        "--num_attention_heads 2 --intermediate_size 32 --num_train_epochs none --max_train_steps 3 --global_batch_size 10 "
        "--num_generations 3 --generation_metrics word_error_rate exact_match"
    )
    folder = train("listening", more, program=PROGRAM)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    tokenizer, extractor = AutoTokenizer.from_pretrained(folder), AutoFeatureExtractor.from_pretrained(folder)
    lines = [json.loads(line) for line in (folder / "generations.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3
    for number, line in enumerate(lines):
        assert line["source"] == f"builtin/spoken_digits, validation {number}"
        sound = spoken_digits.draw_sound(load("speech_small_cpu").seed, "validation", number)
        features = extractor(sound, sampling_rate=audio.RATE, return_tensors="pt")["input_features"]
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            tokens = model.generate(features, max_new_tokens=8)
        assert tokenizer.decode(tokens[0], skip_special_tokens=True).strip() == line["generated"]


# ---------------------------------------------------------------------------------------------------------------------
# Samples are shown


@pytest.mark.rooms
def test_recordings_are_shown_by_their_length_and_rate(tmp_path, whisper):
    """As they were written; of a target the given tokens are not marked."""
    from samestep.contrib.showing.page import write_page
    from samestep.contrib.showing.texts import show_samples

    channels = np.stack([tone(440, 44100)] * 2, 1)
    (tmp_path / "music.wav").write_bytes(encode(channels, 44100))
    _, base, _ = whisper
    shape = "architecture hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings"
    changes = dict.fromkeys([*shape.split(), "vocab_size"]) | {"model_name_or_path": str(base), "max_target_length": 40}
    changes |= {"source_language": "german", "target_language": "german"}
    pairs = build(write_rows(tmp_path, [{"audio": "music.wav", "text": "la <b>la"}]), **changes)
    text = "\n".join(show_samples(pairs, 1))
    assert "source: 50 tokens, 0 trained" in text
    assert f"[recording {tmp_path / 'music.wav'}: 0.50 seconds at 44,100 Hz, 2 channels]" in text
    assert "<|de|><|transcribe|><|notimestamps|>[[la <b>la<|endoftext|>]]" in text
    page = write_page(pairs.recipe, pairs, None, 1)
    assert "0.50 seconds at 44,100 Hz" in page
    assert "<mark>la &lt;b&gt;la&lt;|endoftext|&gt;</mark>" in page


@pytest.mark.rooms
@pytest.mark.parametrize("recipe", ["speech_small_cpu", "seq2seq_small_cpu"])
def test_the_command_shows_pairs(capsys, tmp_path, recipe):
    words = f"show-data {recipe} --num_train_samples 40 --num_validation_samples 4"
    assert exit_code(lambda: cli.main(words.split())) == 0
    out = capsys.readouterr().out
    assert out.count("--- sample ") == 3
    assert out.count("\ntarget: ") == 3
    assert ("seconds at 16,000 Hz, drawn]" in out) == (recipe == "speech_small_cpu")
    assert exit_code(lambda: cli.main([*words.split(), "--html", str(tmp_path / "data.html")])) == 0
    assert (tmp_path / "data.html").read_text(encoding="utf-8").count("<article>") == 3
