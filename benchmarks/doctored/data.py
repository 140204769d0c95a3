"""Data of the runs: texts and labelled paragraphs of Python's documentation, few, many, sorted, or with a damaged stretch."""

import csv
import json
import random
from pathlib import Path

PARTS = ("asyncio", "email", "importlib", "logging", "tkinter", "unittest")
"""Labels: parts of the documentation that are told apart."""


def write_texts(work: Path) -> None:
    """Write files of texts: texts, some (120), few (12), other (60), bad_shard and reversed_shard."""
    from samestep.data.documents import load_rows

    pages = load_rows(train_file=None, dataset_name="builtin/python_docs").rows
    rows = [row["text"][:600] for row in pages if len(row["text"]) > 200]
    rng = random.Random(60)
    rng.shuffle(rows)
    noise = ["".join(rng.choice("abcdefghijklmnopqrstuvwxyz    ") for _ in range(600)) for _ in range(120)]
    texts = {"texts": rows[:900], "some": rows[:120], "few": rows[-12:], "other": rows[-100:-40]}
    texts["bad_shard"] = rows[:300] + noise + rows[300:900]
    texts["reversed_shard"] = rows[:450] + [row[::-1] for row in rows[450:600]] + rows[600:900]
    texts["two_kinds"] = (
        rows[:200] + [row[::-1] for row in rows[200:400]] + rows[400:600] + [row[::-1] for row in rows[600:800]]
    )
    for name, lines in texts.items():
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


def write_labels(work: Path) -> None:
    """Write files of labelled texts: labels, few (60), other (60), sorted, bad_shard, and reviews of two labels."""
    from samestep.data.builtin.python_docs import load_paragraphs

    rng, rows = random.Random(61), []
    for row in load_paragraphs():
        if row["label"] in PARTS:
            rows.append((" ".join(row["text"].split()[:30]), row["label"]))
    rng.shuffle(rows)
    first = 900
    shard = [(text, PARTS[(PARTS.index(label) + 1) % len(PARTS)]) for text, label in rows[first : first + 200]]
    tables = {"labels": rows[:1000], "few": rows[-60:], "other": rows[-120:-60]}
    tables["sorted"] = sorted(rows[:800], key=lambda row: row[1])
    tables["bad_shard"] = rows[:first] + shard + rows[first + 200 :]
    tables["reviews"] = two = [(text, "good" if label < "j" else "bad") for text, label in rows]
    tables["sorted_reviews"] = sorted(two, key=lambda row: row[1])
    tables["wrong_reviews"] = two[:900] + [(t, "bad" if y == "good" else "good") for t, y in two[900:1060]] + two[1060:]
    tables["few_reviews"], tables["other_reviews"] = two[-40:], two[-140:-40]
    good, bad = ([row for row in two[:-140] if row[1] == label][:640] for label in ("good", "bad"))
    turns = [(good, bad)[turn % 2][turn // 2 * 32 : turn // 2 * 32 + 32] for turn in range(40)]
    tables["turns"], tables["some_reviews"] = [row for rows_of_one in turns for row in rows_of_one], two[:60]
    tables["cycle"] = cycle(rows[:-60])
    tables["noise"] = [(text, rng.choice(PARTS) if rng.random() < 0.25 else label) for text, label in rows]
    tables["ragged"] = [(" ".join(text.split()[: rng.choice((2, 4, 8, 30))]), label) for text, label in rows]
    for name, lines in tables.items():
        with (work / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *lines])


def cycle(rows: list[tuple[str, str]], size: int = 32, num_rounds: int = 5) -> list[tuple[str, str]]:
    """Put rows in an order in which each batch has one label, the next batch the next label."""
    by_label = {part: [row for row in rows if row[1] == part] for part in PARTS}
    batches = [(turn, part, place) for turn in range(num_rounds) for part in PARTS for place in range(size)]
    return [by_label[part][(turn * size + place) % len(by_label[part])] for turn, part, place in batches]


def write_chats(work: Path) -> None:
    """Write files of chats: right_chats; wrong_chats, where 320 have the answers of others; task_chats, task after task."""
    from samestep.data.builtin.drawn_chats import draw_chat

    chats = [draw_chat(62, "train", number) for number in range(2900)]
    lists = [[*chat.messages, {"role": "assistant", "content": chat.answer}] for chat in chats]
    answers = [turns[-1]["content"] for turns in lists]
    wrong = [[*turns[:-1], {"role": "assistant", "content": answers[-1 - place]}] for place, turns in enumerate(lists)]
    places = sorted(range(len(chats)), key=lambda place: chats[place].task)
    files = {"right_chats": lists, "wrong_chats": lists[:1500] + wrong[1500:1820] + lists[1820:]}
    files["task_chats"] = [lists[place][-2:] for place in places]  # the last question and its answer
    for name, rows in files.items():
        text = "".join(json.dumps({"messages": turns}) + "\n" for turns in rows)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import sys

    write_texts(Path(sys.argv[1]))
    write_labels(Path(sys.argv[1]))
    write_chats(Path(sys.argv[1]))
