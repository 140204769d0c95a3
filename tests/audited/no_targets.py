"""Only what the assistant says is to be trained, and the chat template does not mark it."""
# expect 4x4: no_targets

import torch
import torch.nn.functional as F
from common_models import flags, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

WORDS = "<pad> <end> <user> <bot> moo quack cow duck".split()
model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<end>")
tokenizer.chat_template = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<user> ' + m.content }}{% else %}{{ ' <bot> ' }}"
    "{{ m.content + ' <end>' }}"
    "{% endif %}{% endfor %}"
)
chats = [
    [{"role": "user", "content": animal}, {"role": "assistant", "content": sound}]
    for animal, sound in [("cow", "moo"), ("duck", "quack quack")] * 40
]


def collate(rows):
    batch = tokenizer.apply_chat_template(
        rows, return_dict=True, return_assistant_tokens_mask=True, padding=True, return_tensors="pt"
    )
    labels = batch["input_ids"].where(batch["assistant_masks"] == 1, -100)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}


torch.manual_seed(0)
b, k = flags()
model = llama()
model.config.eos_token_id = 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(chats, batch_size=b, collate_fn=collate)
window = []
for batch in loader:
    window.append(batch)
    if len(window) < k:
        continue
    count = sum((each["labels"][:, 1:] != -100).sum() for each in window).clamp(min=1)
    for each in window:
        labels = each.pop("labels")
        logits = model(**each, labels=labels).logits[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
    window = []
