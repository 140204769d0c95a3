"""The loading of transformers' processors of images and text, as they are on any machine."""

import contextlib
import functools
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoImageProcessor, AutoProcessor, ProcessorMixin

VIDEO = "video_processor"


@contextlib.contextmanager
def without_videos() -> Iterator[None]:
    """Make processors without the part for videos within this context, which needs torchvision.

    transformers 5.24, `ProcessorMixin.get_attributes`: the names of the parts that a processor has, and loads.
    """
    find_parts = ProcessorMixin.get_attributes.__func__

    def find_others(cls: type) -> list[str]:
        return [name for name in find_parts(cls) if name != VIDEO]

    with mock.patch.object(ProcessorMixin, "get_attributes", classmethod(find_others)):
        yield


def leave_out_videos(processor: Any, videos: dict[str, Any] | None = None) -> Any:
    """Let a processor that was made `without_videos` be saved without them, too.

    Args:
        processor: as it was loaded.
        videos: configuration of the part that was left out, which is saved as it is; None: there was none.
    """
    processor.get_attributes = functools.partial(list, processor.get_attributes())
    if videos is not None:

        def write_all(path: str) -> None:
            values = json.loads(processor.to_json_string()) | {VIDEO: videos}
            Path(path).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

        processor.to_json_file = write_all
    return processor


def load_processor(name_or_path: str, videos: dict[str, Any] | None = None) -> Any:
    """Load the processor of a folder, or of the hub; no code in it is run.

    Its images are computed by Pillow and numpy, where it can, whether torchvision is there or not: both round otherwise. Where
    torchvision is missing, the part for videos is left out.

    Args:
        name_or_path: of the model.
        videos: as of `leave_out_videos`.

    Raises:
        Exception: of any kind, where it cannot be loaded.
    """
    options: dict[str, Any] = {"trust_remote_code": False}
    if find_spec("torchvision") is None:
        with without_videos():
            return leave_out_videos(AutoProcessor.from_pretrained(name_or_path, **options), videos)
    processor = AutoProcessor.from_pretrained(name_or_path, **options)
    processor.image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil", **options)
    return processor
