"""The runs of `doctor.py`, broken on purpose or sound: those that fit the rules, those that check them, and blind ones.

A line has the name of a run, its program, what was done to it, the findings that name that (`none`: it is sound), and flags.
What was done, beside flags:

    dead:PART            the gradient of parameters whose names contain PART is zero
    relu:PART            these parameters are -100 at first, so that no ReLU behind them lets anything through
    boost:PART:FACTOR    the gradient of these parameters is multiplied
    same_order           each epoch has the order of the first
    sorted               each epoch has the order of the file
    restarts:STEPS       the rate falls to nothing by a half cosine, and begins anew
    ramp:FACTOR          the rate grows from step to step, at the end to so many times the recipe's
    past_end:STEPS       the rate falls in a line to nothing in these steps, and below nothing after them
    kick:STEP:FACTOR     the gradient of one step is multiplied
    upset:STEP:PART:FACTOR  parameters are multiplied before one step
    resumed:STEP         the run stops after a step, and is resumed from its checkpoint
    from:NAME            the run goes on with the model of another
"""

from typing import NamedTuple

BASES = {
    "pretrain_gpt2": "--recipe gpt2_small_cpu --vocab_size 600 --block_size 64 --n_positions 64 --n_embd 64 --n_layer 2 "
    "--n_head 2 --max_train_steps 120 --num_warmup_steps 12 --learning_rate 3e-3 --train_file WORK/texts.jsonl",
    "finetune_classifier": "--recipe finetune_small_cpu --vocab_size 600 --max_seq_length 48 --hidden_size 48 "
    "--num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 96 --num_train_epochs none --max_train_steps 120 "
    "--learning_rate 2e-3 --warmup_ratio 0.1 --train_file WORK/labels.csv",
    "train_image_classifier": "--recipe resnet_digits_cpu --image_height 16 --image_width 16 --embedding_size 8 "
    "--hidden_sizes 8 16 --depths 1 1 --label_smoothing 0 --num_train_epochs none --max_train_steps 120 --warmup_ratio 0.1 "
    "--learning_rate 0.1",
    "pretrain_modern": "--recipe gpt_modern_small_cpu --vocab_size 600 --block_size 64 --max_position_embeddings 64 "
    "--hidden_size 64 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 128 --global_batch_size 16 "
    "--max_train_steps 120 --train_file WORK/texts.jsonl",
    "pretrain_modern_bert": "--recipe bert_modern_small_cpu --vocab_size 600 --max_seq_length 64 --max_position_embeddings 64 "
    "--hidden_size 64 --num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 128 --global_batch_size 16 "
    "--max_train_steps 120 --train_file WORK/texts.jsonl",
    "pretrain_bert": "--recipe bert_small_cpu --vocab_size 600 --max_seq_length 64 --hidden_size 64 --num_hidden_layers 2 "
    "--num_attention_heads 2 --intermediate_size 128 --max_train_steps 140 --warmup_ratio 0.1 --learning_rate 2e-3 "
    "--train_file WORK/texts.jsonl",
    "finetune_causal_lm": "--recipe sft_small_cpu --num_train_samples 2000 --num_validation_samples 60 --hidden_size 48 "
    "--num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 96 --max_train_steps 140 --num_generations 0",
    "finetune_seq2seq": "--recipe seq2seq_small_cpu --num_train_samples 4000 --num_validation_samples 100 --hidden_size 48 "
    "--num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 96 --global_batch_size 32 --num_generations 0 "
    "--num_train_epochs none --max_train_steps 150 --warmup_ratio 0.1 --lr_scaling_rule none",
    "finetune_reviews": "--recipe finetune_reviews_cpu --vocab_size 500 --max_seq_length 32 --hidden_size 32 "
    "--num_hidden_layers 1 --num_attention_heads 2 --intermediate_size 64 --num_train_epochs none --max_train_steps 160 "
    "--num_labels none --metrics accuracy --train_file WORK/reviews.csv",
    "chars": "--recipe gpt2_shakespeare_char_cpu --tokenizer characters --vocab_size 90 --block_size 48 --n_positions 48 "
    "--n_embd 48 --n_layer 4 --n_head 3 --txt_documents auto --validation_split random --max_train_steps 160 "
    "--num_warmup_steps 12 --learning_rate 1.5e-3 --train_file WORK/texts.jsonl",
    "qwen": "--recipe sft_small_cpu --architecture qwen3 --num_train_samples 3000 --num_validation_samples 60 "
    "--hidden_size 64 --num_hidden_layers 3 --num_attention_heads 2 --num_key_value_heads 1 --intermediate_size 128 "
    "--global_batch_size 16 --lr_scaling_rule none --max_train_steps 160 --learning_rate 2e-3 --num_generations 0",
    "speech": "--recipe speech_small_cpu --num_train_samples 4000 --num_validation_samples 60 --hidden_size 48 "
    "--num_hidden_layers 2 --num_attention_heads 2 --intermediate_size 96 --global_batch_size 16 --lr_scaling_rule none "
    "--num_generations 0 --num_train_epochs none --max_train_steps 150 --learning_rate 3e-3",
    "captcha": "--recipe captcha_cpu --image_height 32 --image_width 56 --num_characters 2 --alphabet 01234567 "
    "--conv_channels 8 16 32 --hidden_size 48 --num_train_samples 4000 --num_validation_samples 200 "
    "--global_batch_size 32 --lr_scaling_rule none --warmup_epochs none --num_warmup_steps 15 --num_train_epochs none "
    "--max_train_steps 200 --learning_rate 0.05",
    "embed": "--recipe embeddings_small_cpu --vocab_size 900 --max_seq_length 24 --max_position_embeddings 24 "
    "--hidden_size 48 --num_attention_heads 3 --intermediate_size 96 --global_batch_size 48 --lr_scaling_rule none "
    "--num_train_epochs none --max_train_steps 95 --learning_rate 2e-3",
    "deep_labels": "--recipe finetune_small_cpu --vocab_size 700 --max_seq_length 40 --hidden_size 40 "
    "--num_hidden_layers 4 --num_attention_heads 4 --intermediate_size 80 --num_train_epochs none --max_train_steps 150 "
    "--learning_rate 2e-3 --lr_scaling_rule none --train_file WORK/labels.csv",
    "batch_norm": "--recipe resnet_digits_cpu --image_height 20 --image_width 20 --normalization batch --embedding_size 8 "
    "--hidden_sizes 8 16 24 --depths 1 2 1 --label_smoothing 0 --global_batch_size 48 --lr_scaling_rule none "
    "--num_train_epochs none --warmup_epochs none --warmup_ratio 0.1 --max_train_steps 140 --learning_rate 0.05",
    "deep_muon": "--recipe gpt_modern_small_cpu --vocab_size 800 --block_size 48 --max_position_embeddings 48 "
    "--hidden_size 48 --num_hidden_layers 5 --num_attention_heads 2 --intermediate_size 96 --global_batch_size 8 "
    "--document_mask --max_train_steps 150 --train_file WORK/texts.jsonl",
}
"""Program, or program of other settings -> its flags. The first four have the runs for fitting, five the check's."""
SCRIPTS = {
    "batch_norm": "train_image_classifier",
    "captcha": "train_captcha",
    "chars": "pretrain_gpt2",
    "deep_labels": "finetune_classifier",
    "deep_muon": "pretrain_gpt2",
    "embed": "train_embeddings",
    "qwen": "finetune_causal_lm",
    "speech": "finetune_seq2seq",
    "finetune_reviews": "finetune_classifier",
    "pretrain_modern": "pretrain_gpt2",
    "pretrain_modern_bert": "pretrain_bert",
}
COMMON = "--speed safe --watch_layers 4 --eval_steps 20 --validation_fraction 0.1 --output_dir OUT"
DRAWN = ("train_captcha",)
"""Programs that draw samples to hold out, instead of a share of their data."""
OWN_SHAPE = " ".join(
    f"--{field} none"
    for field in (
        "architecture hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size "
        "max_position_embeddings tie_word_embeddings initializer_range"
    ).split()
)
"""Flags of a run whose shape is that of the model that it goes on from."""
NO_HEADS = OWN_SHAPE.replace("--num_key_value_heads none ", "")
RATE = "rate,divergence,warm_up"

FIT = f"""
gpt_rate_30     | pretrain_gpt2 | | {RATE} | --learning_rate 0.1 --seed 1
gpt_rate_10     | pretrain_gpt2 | | {RATE} | --learning_rate 0.03 --seed 2 --max_grad_norm none
gpt_no_warm_up  | pretrain_gpt2 | | {RATE} | --learning_rate 0.02 --num_warmup_steps 0 --seed 3
gpt_bad_beta    | pretrain_gpt2 | | {RATE},oscillation | --learning_rate 0.01 --adam_beta1 0.98 --adam_beta2 0.6 --seed 4
gpt_dead        | pretrain_gpt2 | dead:h.1. | dead_layer | --seed 5
gpt_boost       | pretrain_gpt2 | boost:h.0.:1000 | exploding_layer | --seed 6
gpt_slow        | pretrain_gpt2 | | plateau | --learning_rate 3e-7 --seed 7
gpt_few         | pretrain_gpt2 | | overfitting | --train_file WORK/few.jsonl --validation_file WORK/other.jsonl --seed 8
gpt_same_order  | pretrain_gpt2 | same_order | order | --train_file WORK/some.jsonl --seed 9
gpt_bad_shard   | pretrain_gpt2 | sorted | order,spike | --train_file WORK/bad_shard.jsonl --max_train_steps 100 --seed 10
label_rate_50   | finetune_classifier | | {RATE} | --learning_rate 0.1 --seed 11
label_dead      | finetune_classifier | dead:encoder.layer.0. | dead_layer | --seed 12
label_few       | finetune_classifier | | overfitting | --train_file WORK/few.csv --validation_file WORK/other.csv --seed 13
label_sorted    | finetune_classifier | sorted | order | --train_file WORK/sorted.csv --seed 14
label_shard     | finetune_classifier | sorted | order,spike | \
    --train_file WORK/bad_shard.csv --global_batch_size 8 --lr_scaling_rule none --max_train_steps 160 \
    --seed 15
label_frozen    | finetune_classifier | | plateau | --learning_rate 1e-8 --seed 16
image_rate_50   | train_image_classifier | | {RATE} | --learning_rate 5 --seed 17
image_relu      | train_image_classifier | relu:embedder.embedder.normalization.bias | dead_layer | --seed 18
image_clipped   | train_image_classifier | | clipping | --max_grad_norm 1e-3 --seed 19
image_same_order | train_image_classifier | same_order | order | --seed 20
gpt_sound        | pretrain_gpt2 | | none | --seed 101
gpt_no_clip      | pretrain_gpt2 | | none | --max_grad_norm none --seed 102
gpt_often_clipped | pretrain_gpt2 | | none | --max_grad_norm 0.3 --seed 103
gpt_restarts     | pretrain_gpt2 | restarts:40 | none | --seed 104
gpt_growing      | pretrain_gpt2 | | none | --batch_schedule "4, 16 at 0.4" --lr_scaling_rule none --seed 105
gpt_noisy        | pretrain_gpt2 | | none | --global_batch_size 2 --lr_scaling_rule none --learning_rate 1e-3 --seed 106
gpt_constant     | pretrain_gpt2 | | none | --lr_scheduler_type constant --seed 107
gpt_some         | pretrain_gpt2 | | none | --train_file WORK/some.jsonl --max_train_steps 60 --seed 108
gpt_again        | pretrain_gpt2 | from:gpt_sound | none | --learning_rate 3e-4 --seed 109
gpt_converged    | pretrain_gpt2 | from:gpt_again | none | --learning_rate 5e-5 --lr_scheduler_type constant --seed 110
label_sound      | finetune_classifier | | none | --seed 111
label_noisy      | finetune_classifier | | none | --global_batch_size 4 --lr_scaling_rule none --learning_rate 5e-4 --seed 112
label_clipped    | finetune_classifier | | none | --max_grad_norm 0.5 --seed 113
label_again      | finetune_classifier | from:label_sound | none | --learning_rate 2e-4 --seed 114
label_some       | finetune_classifier | | none | --train_file WORK/few.csv --max_train_steps 30 --seed 115
image_sound      | train_image_classifier | | none | --seed 116
image_restarts   | train_image_classifier | restarts:60 | none | --seed 117
image_noisy      | train_image_classifier | | none | \
    --global_batch_size 8 --lr_scaling_rule none --learning_rate 0.02 --seed 118
muon_sound       | pretrain_modern | | none | --seed 119
image_adamw      | train_image_classifier | | none | \
    --optimizer adamw --sgd_momentum none --adam_beta1 0.9 --adam_beta2 0.99 --adam_epsilon 1e-8 \
    --lr_scaling_rule sqrt --learning_rate 3e-3 --weight_decay 0.05 --seed 120
"""
CHECK = f"""
bert_rate_30     | pretrain_bert | | {RATE} | --learning_rate 0.06 --seed 201
bert_no_warm_up  | pretrain_bert | | {RATE} | --learning_rate 0.02 --warmup_ratio 0 --seed 202
bert_bad_beta    | pretrain_bert | | {RATE},oscillation | --learning_rate 0.01 --adam_beta1 0.99 --adam_beta2 0.5 --seed 203
bert_dead        | pretrain_bert | dead:layer.1. | dead_layer | --seed 204
bert_same_order  | pretrain_bert | same_order | order | --train_file WORK/some.jsonl --seed 205
bert_bad_shard   | pretrain_bert | sorted | order,spike | --train_file WORK/bad_shard.jsonl --seed 206
chat_rate_20     | finetune_causal_lm | | {RATE} | --learning_rate 0.06 --seed 207
chat_no_warm_up  | finetune_causal_lm | | {RATE} | --learning_rate 0.03 --warmup_ratio none --num_warmup_steps 0 --seed 208
chat_boost       | finetune_causal_lm | boost:layers.1.:1000 | exploding_layer | --seed 209
chat_slow        | finetune_causal_lm | | plateau | --learning_rate 1e-7 --seed 210
chat_few         | finetune_causal_lm | | overfitting | --num_train_samples 32 --seed 211
chat_clipped     | finetune_causal_lm | | clipping | --max_grad_norm 1e-3 --seed 212
spell_rate_30    | finetune_seq2seq | | {RATE} | --learning_rate 0.06 --seed 213
spell_dead       | finetune_seq2seq | dead:encoder.block | dead_layer | --seed 214
spell_bad_beta   | finetune_seq2seq | | {RATE},oscillation | --learning_rate 0.02 --adam_beta1 0.98 --adam_beta2 0.5 --seed 215
spell_few        | finetune_seq2seq | | overfitting | --num_train_samples 48 --seed 216
review_rate_100  | finetune_reviews | | {RATE} | --learning_rate 0.1 --seed 217
review_sorted    | finetune_reviews | sorted | order | --train_file WORK/sorted_reviews.csv --seed 218
review_shard     | finetune_reviews | sorted | order,spike | \
    --train_file WORK/wrong_reviews.csv --learning_rate 3e-3 --global_batch_size 8 --lr_scaling_rule none \
    --max_train_steps 140 --seed 219
review_few       | finetune_reviews | | overfitting | \
    --train_file WORK/few_reviews.csv --validation_file WORK/other_reviews.csv --learning_rate 3e-3 \
    --seed 220
bert_sound       | pretrain_bert | | none | --seed 301
bert_noisy       | pretrain_bert | | none | --global_batch_size 3 --lr_scaling_rule none --learning_rate 7e-4 --seed 302
bert_constant    | pretrain_bert | | none | --lr_scheduler_type constant --seed 303
bert_restarts    | pretrain_bert | restarts:45 | none | --seed 304
bert_clipped     | pretrain_bert | | none | --max_grad_norm 0.3 --seed 305
bert_again       | pretrain_bert | from:bert_sound | none | --learning_rate 2e-4 --seed 306
chat_sound       | finetune_causal_lm | | none | --seed 307
chat_noisy       | finetune_causal_lm | | none | --global_batch_size 4 --lr_scaling_rule none --learning_rate 1e-3 --seed 308
muon_masks       | pretrain_modern_bert | | none | --seed 309
chat_growing     | finetune_causal_lm | | none | \
    --batch_schedule "8, 32 at 0.3" --lr_scaling_rule none --learning_rate 1.5e-3 --seed 310
chat_again       | finetune_causal_lm | from:chat_sound | none | {OWN_SHAPE} --learning_rate 3e-4 --seed 311
chat_some        | finetune_causal_lm | | none | --num_train_samples 300 --max_train_steps 40 --seed 312
spell_sound      | finetune_seq2seq | | none | --seed 313
spell_restarts   | finetune_seq2seq | restarts:50 | none | --seed 314
spell_clipped    | finetune_seq2seq | | none | --max_grad_norm 0.5 --seed 315
spell_constant   | finetune_seq2seq | | none | --lr_scheduler_type constant --learning_rate 1e-3 --seed 316
review_sound     | finetune_reviews | | none | --seed 317
review_noisy     | finetune_reviews | | none | --global_batch_size 4 --lr_scaling_rule none --learning_rate 3e-4 --seed 318
review_again     | finetune_reviews | from:review_sound | none | --learning_rate 1e-4 --seed 319
review_some      | finetune_reviews | | none | --train_file WORK/few.csv --max_train_steps 30 --seed 320
"""

AGAIN = """
review_sound_2   | finetune_reviews | | none | --seed 401
review_faster    | finetune_reviews | | none | --learning_rate 2e-3 --seed 402
review_small     | finetune_reviews | | none | --global_batch_size 8 --lr_scaling_rule none --learning_rate 1e-3 --seed 403
review_constant  | finetune_reviews | | none | --lr_scheduler_type constant --seed 404
spell_small      | finetune_seq2seq | | none | --global_batch_size 8 --learning_rate 1e-3 --seed 405
spell_decay      | finetune_seq2seq | | none | --lr_scheduler_type warmup_stable_decay --seed 406
chat_constant    | finetune_causal_lm | | none | --lr_scheduler_type constant --learning_rate 2e-3 --seed 407
chat_clip        | finetune_causal_lm | | none | --max_grad_norm 0.3 --seed 408
bert_linear      | pretrain_bert | | none | --lr_scheduler_type linear --seed 409
gpt_linear       | pretrain_gpt2 | | none | --lr_scheduler_type linear --seed 410
label_linear     | finetune_classifier | | none | --lr_scheduler_type linear --learning_rate 1e-3 --seed 411
image_linear     | train_image_classifier | | none | --lr_scheduler_type linear --seed 412
"""
"""Sound runs that were made after a rule was mended that had accused `review_sound`."""


BLIND = f"""
chars_rate_60     | chars | | {RATE} | --learning_rate 0.09 --seed 501
captcha_rate_60   | captcha | | {RATE} | --learning_rate 3 --max_grad_norm none --seed 502
speech_no_warm_up | speech | | {RATE} | --learning_rate 0.03 --warmup_ratio none --num_warmup_steps 0 --seed 503
labels_no_warm_up | deep_labels | | {RATE} | --learning_rate 0.02 --warmup_ratio none --num_warmup_steps 0 --seed 504
qwen_ramp         | qwen | ramp:40 | divergence,rate | \
    --warmup_ratio none --num_warmup_steps 0 --lr_scheduler_type constant --seed 505
chars_past_end    | chars | past_end:90 | divergence | --seed 506
norm_momentum     | batch_norm | | oscillation,{RATE} | --sgd_momentum 0.98 --learning_rate 0.3 --seed 507
labels_cycle      | deep_labels | sorted | oscillation,order | \
    --train_file WORK/cycle.csv --validation_file WORK/other.csv --seed 508
norm_kick         | batch_norm | kick:80:10 | spike | --seed 509
qwen_upset        | qwen | upset:100:layers.1.:4 | spike | --seed 510
embed_still       | embed | | plateau | --learning_rate 2e-7 --seed 511
captcha_long_warm_up | captcha | | plateau | --num_warmup_steps 100000 --lr_num_steps 200000 --seed 512
speech_deaf       | speech | dead:encoder. | dead_layer | --seed 513
captcha_relu      | captcha | relu:features.5.bias | dead_layer | --seed 514
captcha_boost     | captcha | boost:features.0.:3000 | exploding_layer | --seed 515
captcha_clipped   | captcha | | clipping | --max_grad_norm 2e-3 --seed 516
embed_epochs      | embed | | overfitting | --max_train_steps 320 --learning_rate 3e-3 --seed 517
norm_few          | batch_norm | | overfitting | --validation_fraction 0.97 --augmentation none --seed 518
qwen_by_task      | qwen | sorted | order | \
    --dataset_name none --num_train_samples none --num_validation_samples none --train_file WORK/task_chats.jsonl --seed 519
qwen_wrong_part   | qwen | sorted | order,spike | \
    --dataset_name none --num_train_samples none --num_validation_samples none --train_file WORK/wrong_chats.jsonl --seed 520
chars_sound       | chars | | none | --seed 601
chars_dropout     | chars | | none | --resid_pdrop 0.4 --embd_pdrop 0.3 --attn_pdrop 0.4 --seed 602
chars_decay       | chars | | none | \
    --lr_scheduler_type warmup_stable_sqrt_decay --lr_decay_ratio 0.3 --global_batch_size 24 --lr_scaling_rule none --seed 603
chars_single      | chars | | none | --global_batch_size 1 --lr_scaling_rule none --learning_rate 8e-4 --seed 604
qwen_mixture      | qwen | | none | \
    --dataset_name builtin/drawn_chats:easy builtin/doctests --mixture_weights 0.85 0.15 --global_batch_size 8 --seed 605
qwen_sound        | qwen | | none | --max_train_steps 300 --seed 606
qwen_lora         | qwen | from:qwen_sound | none | \
    {OWN_SHAPE} --lora_rank 4 --lora_alpha 8 --dataset_config_name hard --learning_rate 1e-3 --seed 607
qwen_preferences  | qwen | from:qwen_sound | none | \
    {OWN_SHAPE} --objective orpo --dataset_name builtin/drawn_pairs --train_on completions \
    --learning_rate 5e-4 --weight_decay 0 --max_train_steps 120 --seed 608
qwen_resumed      | qwen | resumed:70 | none | --seed 609
speech_sound      | speech | | none | --seed 610
speech_growing    | speech | | none | --batch_schedule "4, 8 at 0.2, 16 at 0.6" --learning_rate 2e-3 --seed 611
speech_long       | speech | from:speech_sound | none | \
    {NO_HEADS} --num_decoder_layers none --lr_scheduler_type constant --learning_rate 2e-5 --max_train_steps 250 --seed 612
captcha_sound     | captcha | | none | --seed 613
captcha_restarts  | captcha | restarts:50 | none | --seed 614
norm_smoothing    | batch_norm | | none | --label_smoothing 0.25 --seed 615
labels_noise      | deep_labels | | none | --train_file WORK/noise.csv --global_batch_size 16 --max_train_steps 200 --seed 616
labels_ragged     | deep_labels | | none | \
    --train_file WORK/ragged.csv --global_batch_size 6 --learning_rate 1e-3 --max_train_steps 250 --seed 617
labels_frozen     | deep_labels | from:labels_noise | none | --freeze_embeddings --layerwise_lr_decay 0.7 --seed 618
embed_sound       | embed | | none | --seed 619
muon_deep         | deep_muon | | none | --seed 620
"""
"""Runs of other programs, shapes, data and faults, listed and trained by somebody who had not read the rules."""
TWINS = """
chars_rate_60     | chars | | none | --seed 501
captcha_rate_60   | captcha | | none | --seed 502
speech_no_warm_up | speech | | none | --seed 503
labels_no_warm_up | deep_labels | | none | --seed 504
qwen_ramp         | qwen | | none | \
    --warmup_ratio none --num_warmup_steps 0 --lr_scheduler_type constant --seed 505
chars_past_end    | chars | | none | --lr_scheduler_type linear --seed 506
norm_momentum     | batch_norm | | none | --seed 507
labels_cycle      | deep_labels | | none | --train_file WORK/cycle.csv --validation_file WORK/other.csv --seed 508
norm_kick         | batch_norm | | none | --seed 509
qwen_upset        | qwen | | none | --seed 510
embed_still       | embed | | none | --seed 511
captcha_long_warm_up | captcha | | none | --seed 512
speech_deaf       | speech | | none | --seed 513
captcha_relu      | captcha | | none | --seed 514
captcha_boost     | captcha | | none | --seed 515
captcha_clipped   | captcha | | none | --seed 516
embed_epochs      | embed | | none | --learning_rate 3e-3 --seed 517
norm_few          | batch_norm | | none | --validation_fraction 0.5 --augmentation none --seed 518
qwen_by_task      | qwen | | none | \
    --dataset_name none --num_train_samples none --num_validation_samples none --train_file WORK/task_chats.jsonl --seed 519
qwen_wrong_part   | qwen | | none | \
    --dataset_name none --num_train_samples none --num_validation_samples none --train_file WORK/right_chats.jsonl --seed 520
"""
"""Beside each broken run of `BLIND` the one without its fault: only their losses are kept, which say what the fault cost."""

FRESH = f"""
modern_two_kinds  | pretrain_modern | sorted | order | --train_file WORK/two_kinds.jsonl --seed 701
review_by_heart   | finetune_reviews | | overfitting | \
    --train_file WORK/some_reviews.csv --validation_file WORK/other_reviews.csv --learning_rate 2e-3 \
    --max_train_steps 220 --seed 702
spell_ramp        | finetune_seq2seq | ramp:400 | {RATE} | --learning_rate 1e-3 --lr_scheduler_type constant --seed 703
gpt_reversed      | pretrain_gpt2 | sorted | order,spike | --train_file WORK/reversed_shard.jsonl --seed 704
embed_rate_80     | embed | | {RATE} | --learning_rate 0.16 --seed 705
embed_dead        | embed | dead:layer.0. | dead_layer | --seed 706
spell_upset       | finetune_seq2seq | upset:95:decoder.:2 | spike | --seed 707
speech_clipped    | speech | | clipping | --max_grad_norm 1e-9 --seed 708
spell_past_end    | finetune_seq2seq | past_end:80 | divergence | --seed 709
review_in_turns   | finetune_reviews | sorted | oscillation,order | \
    --train_file WORK/turns.csv --validation_file WORK/other_reviews.csv --seed 710
mistral_sound     | qwen | | none | --architecture mistral --seed 801
mistral_restarts  | qwen | restarts:55 | none | --architecture mistral --seed 802
bart_smoothing    | finetune_seq2seq | | none | \
    --architecture bart --max_position_embeddings 96 --dropout 0.2 --label_smoothing 0.1 --seed 803
spell_small       | finetune_seq2seq | | none | --global_batch_size 4 --learning_rate 7e-4 --seed 804
embed_cls         | embed | | none | --pooling cls --temperature 0.1 --global_batch_size 32 --max_train_steps 130 --seed 805
masks_many        | pretrain_modern_bert | | none | --mlm_probability 0.4 --seed 806
captcha_norm      | captcha | | none | --normalization batch --global_batch_size 8 --learning_rate 0.02 --seed 807
muon_small        | deep_muon | | none | --global_batch_size 2 --seed 809
labels_dropout    | deep_labels | | none | --hidden_dropout_prob 0.2 --attention_probs_dropout_prob 0.2 --seed 810
labels_long       | deep_labels | from:labels_dropout | none | \
    --lr_scheduler_type constant --learning_rate 3e-5 --max_train_steps 260 --seed 811
speech_resumed    | speech | resumed:90 | none | --lr_scheduler_type constant --learning_rate 2e-3 --seed 813
chars_floor       | chars | | none | --min_lr_ratio 0.2 --global_batch_size 32 --lr_scaling_rule none --seed 814
qwen_levels       | qwen | | none | \
    --dataset_name builtin/drawn_chats:easy builtin/drawn_chats:hard --mixture_weights 0.5 0.5 --seed 815
"""
"""Runs that were made after the rules were mended that had missed five of `BLIND`."""
FRESH_TWINS = """
modern_two_kinds  | pretrain_modern | | none | --train_file WORK/two_kinds.jsonl --seed 701
review_by_heart   | finetune_reviews | | none | --learning_rate 2e-3 --max_train_steps 220 --seed 702
spell_ramp        | finetune_seq2seq | | none | --learning_rate 1e-3 --lr_scheduler_type constant --seed 703
gpt_reversed      | pretrain_gpt2 | | none | --seed 704
embed_rate_80     | embed | | none | --seed 705
embed_dead        | embed | | none | --seed 706
spell_upset       | finetune_seq2seq | | none | --seed 707
speech_clipped    | speech | | none | --seed 708
spell_past_end    | finetune_seq2seq | | none | --seed 709
review_in_turns   | finetune_reviews | | none | \
    --train_file WORK/turns.csv --validation_file WORK/other_reviews.csv --seed 710
"""


class Case(NamedTuple):
    """A run.

    Attributes:
        program: one of `BASES`.
        fault: what was done to it, empty: flags alone.
        accepted: findings that name it; empty: it is sound.
        flags: beside those of `BASES` and `COMMON`.
    """

    name: str
    program: str
    fault: str
    accepted: tuple[str, ...]
    flags: str

    @property
    def script(self) -> str:
        return SCRIPTS.get(self.program, self.program)


def read_cases(text: str) -> list[Case]:
    """Read the lines of `FIT` or `CHECK`."""
    cases = []
    for line in text.strip().splitlines():
        name, program, fault, accepted, flags = (part.strip() for part in line.split("|"))
        names = () if accepted == "none" else tuple(accepted.split(","))
        cases.append(Case(name, program, fault, names, flags))
    return cases
