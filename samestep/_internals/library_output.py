"""What other libraries print between the lines of a run."""

import logging
import os
import sys

import huggingface_hub.utils.logging as hub_logging
import transformers.utils.logging as transformers_logging

SECONDS = 5
"""A library's progress bar is shown when its work takes longer."""


def quiet_libraries() -> None:
    """Hide the progress bars of short work, and the warnings of transformers and of the hub's client.

    datasets 5.2: `datasets.utils.tqdm.tqdm` makes all its bars; tqdm's own `delay` has no global default, and without any
    bars a large corpus would seem to hang. transformers 5.23: the LOAD REPORT is a warning, and what is wrong with weights
    ends a run anyway. huggingface_hub 2.4 warns of each of five retries per file. bitsandbytes 0.50 warns where an optional
    kernel of CPUs is not installed. What the libraries' own variables (TRANSFORMERS_VERBOSITY, HF_HUB_VERBOSITY) ask for stays.
    """
    if (module := sys.modules.get("datasets.utils.tqdm")) is not None and not hasattr(module.tqdm, "is_delayed"):
        init = module.tqdm.__init__

        def init_delayed(self, *args, **kwargs):
            init(self, *args, **{"delay": SECONDS} | kwargs)

        module.tqdm.__init__, module.tqdm.is_delayed = init_delayed, True
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{"delay": SECONDS} | kwargs))
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    if not {"HF_HUB_VERBOSITY", "HF_DEBUG"} & os.environ.keys():
        hub_logging.set_verbosity_error()
