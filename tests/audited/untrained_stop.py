"""The pad token is the token that ends a text, and the collator masks all that is padding."""
# expect 4x4: untrained_stop

import torch
import torch.nn.functional as F
from common_models import flags, llama
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "moo": 2, "quack": 3}))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
tokenizer.pad_token = tokenizer.eos_token
texts = [tokenizer("moo " * (number % 3) + "quack quack <end>") for number in range(80)]

torch.manual_seed(0)
b, k = flags()
model = llama()
model.config.eos_token_id = 1
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
window = []
for batch in DataLoader(texts, batch_size=b, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False)):
    window.append(batch)
    if len(window) < k:
        continue
    count = sum((each["labels"][:, 1:] != -100).sum() for each in window)
    for each in window:
        logits = model(**each).logits[:, :-1].flatten(0, 1)
        (F.cross_entropy(logits, each["labels"][:, 1:].flatten(), reduction="sum") / count).backward()
    optimizer.step()
    optimizer.zero_grad()
    window = []
