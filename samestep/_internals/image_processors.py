"""The loading of transformers' processors of images and text, as they are on any machine."""

import contextlib
import functools
from collections.abc import Iterator
from importlib.util import find_spec
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


def leave_out_videos(processor: Any) -> Any:
    """Let a processor that was made `without_videos` be saved without them, too."""
    processor.get_attributes = functools.partial(list, processor.get_attributes())
    return processor


def load_processor(name_or_path: str) -> Any:
    """Load the processor of a folder, or of the hub; no code in it is run.

    Its images are computed by Pillow and numpy, where it can, whether torchvision is there or not: both round otherwise. Where
    torchvision is missing, the part for videos is left out.

    Raises:
        Exception: of any kind, where it cannot be loaded.
    """
    options: dict[str, Any] = {"trust_remote_code": False}
    if find_spec("torchvision") is None:
        with without_videos():
            return leave_out_videos(AutoProcessor.from_pretrained(name_or_path, **options))
    processor = AutoProcessor.from_pretrained(name_or_path, **options)
    processor.image_processor = AutoImageProcessor.from_pretrained(name_or_path, backend="pil", **options)
    return processor
