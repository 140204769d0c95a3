"""Run by `accelerate launch`: several trainings, one after the other, on the same processes."""

import json
import sys

from common import fresh_accelerator, load_script

script = load_script("pretrain_bert")
for argv in json.loads(sys.argv[1]):
    fresh_accelerator()
    script.main(argv)
