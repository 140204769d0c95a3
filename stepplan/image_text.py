"""Models that read pictures and write texts: a tower over patches, a projector, a decoder. Arithmetic only.

`model_from_config` has the parameters, the memory and the work of a sample with pictures of given sizes; `count_patches` how
many patches and tokens a picture of a size becomes. tests/test_image_text_shapes.py compares both with transformers' own.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from samestep.errors import UsageError
from samestep.recipe.reading import format_value
from stepplan import base_models
from stepplan.decoder import Decoder, Tuning
from stepplan.stacks import Stack
from stepplan.transformer import Peak

Config = Mapping[str, Any]
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280},
    "qwen2_5_vl": {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280},
    "qwen3_vl": {"min_pixels": 256 * 256, "max_pixels": 4096 * 4096},
    "idefics3": {"longest_edge": 4 * 364},
    "smolvlm": {"longest_edge": 4 * 364},
    "internvl": {"min_patches": 1, "max_patches": 12},
}
"""`model_type` -> what its processor of pictures decides, where nothing is said; a model's own file may say another."""


class Picture(NamedTuple):
    """A picture as a model reads it.

    Attributes:
        tiles: pictures of one size that it is cut into, the small copy of the whole included.
        patches: of all tiles, which the tower computes.
        tokens: that stand for it in the text, without marks between tiles.
    """

    tiles: int
    patches: int
    tokens: int


class Bridge(NamedTuple):
    """The part between the tower and the text.

    Attributes:
        num_parameters: its parameters.
        flops_per_token: FLOPs of a forward for each token of a picture.
        numbers_per_token: numbers that it saves for each of them.
        matrices: name, width and out of each linear layer, as adapters name it.
    """

    num_parameters: int
    flops_per_token: int
    numbers_per_token: int
    matrices: tuple[tuple[str, int, int], ...] = ()


def count_patches(config: Config, height: int, width: int, processor: Config | None = None) -> Picture:
    """Count the patches and the tokens of a picture.

    Args:
        config: of the model.
        height, width: pixels.
        processor: fields of `PROCESSORS` that its own file says otherwise.

    Raises:
        UsageError: a model_type that is not known.

    >>> config = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}}
    >>> count_patches(config, 448, 448)
    Picture(tiles=1, patches=1024, tokens=256)
    """
    kind, vision = _find_kind(config), config["vision_config"]
    options = PROCESSORS.get(kind, {}) | dict(processor or {})
    patch = _first(vision["patch_size"])
    if kind.startswith("qwen"):
        merge = vision.get("spatial_merge_size", 2)
        sides = _resize(height, width, patch * merge, options["min_pixels"], options["max_pixels"])
        patches = math.prod(side // patch for side in sides)
        return Picture(1, patches, patches // merge**2)
    size = _first(vision["image_size"])
    each = (size // patch) ** 2
    if kind == "gemma3":
        return Picture(1, each, config["mm_tokens_per_image"])
    if kind == "llava":
        has_class = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        left_out = config.get("vision_feature_select_strategy") != "full"  # the first one, a class or not
        return Picture(1, each + has_class, each + has_class - left_out)
    if kind == "internvl":
        tiles = _count_tiles(height, width, size, options["min_patches"], options["max_patches"])
        tiles += tiles > 1
        return Picture(tiles, tiles * (each + 1), round(tiles * each * config.get("downsample_ratio", 0.5) ** 2))
    tiles = _count_splits(height, width, size, options["longest_edge"])
    return Picture(tiles, tiles * each, tiles * each // config.get("scale_factor", 2) ** 2)


def describe_images(images: Sequence[Sequence[int]]) -> str:
    """Name heights and widths of images, equal ones once.

    >>> describe_images([(480, 640), (480, 640), (32, 32)])
    '2 of 480 x 640, 1 of 32 x 32'
    """
    sizes = [tuple(size) for size in images]
    return ", ".join(f"{sizes.count(size)} of {size[0]} x {size[1]}" for size in dict.fromkeys(sizes))


def read_sizes(words: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Read heights and widths of images, as a user writes them.

    Raises:
        UsageError: another form, or no pixels.

    >>> read_sizes(["480x640", "32x32"])
    ((480, 640), (32, 32))
    """
    sizes = []
    for word in words:
        match = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", word)
        if match is None:
            raise UsageError(
                f"image_sizes has {format_value(word)}, must be height and width of each image, as 480x640"
            )
        sizes.append((int(match[1]), int(match[2])))
    return tuple(sizes)


def _find_kind(config: Config) -> str:
    kind = str(config.get("model_type"))
    if kind not in KINDS or not isinstance(config.get("vision_config"), dict):
        value = format_value(config.get("model_type"))
        raise UsageError(
            f"model_type is {value}: of models of pictures and texts {', '.join(KINDS)} are known, with a vision_config"
        )
    return kind


def _first(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _resize(height: int, width: int, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Resize a picture to multiples of a factor, with so many pixels."""
    sides = [max(factor, round(side / factor) * factor) for side in (height, width)]
    if math.prod(sides) > most:
        shrink = math.sqrt(height * width / most)
        sides = [max(factor, math.floor(side / shrink / factor) * factor) for side in (height, width)]
    elif math.prod(sides) < fewest:
        grow = math.sqrt(fewest / (height * width))
        sides = [math.ceil(side * grow / factor) * factor for side in (height, width)]
    return sides[0], sides[1]


def _count_tiles(height: int, width: int, size: int, fewest: int, most: int) -> int:
    """Count the tiles of InternVL: the grid whose shape is nearest to the picture's, of several the last one that fills up."""
    grids = [(x, y) for x in range(1, most + 1) for y in range(1, most + 1) if fewest <= x * y <= most]
    best, nearest, area = 1, math.inf, height * width
    for columns, rows in sorted(grids, key=math.prod):
        distance = abs(width / height - columns / rows)
        if distance < nearest or (distance == nearest and area > 0.5 * size**2 * columns * rows):
            best, nearest = columns * rows, distance
    return best


def _count_splits(height: int, width: int, size: int, longest: int) -> int:
    """Count the tiles of Idefics 3: the picture with its longer side so long, cut into squares, and a small copy of it."""
    ratio = width / height
    if width >= height:
        wide, high = longest, int(longest / ratio) + int(longest / ratio) % 2
    else:
        high, wide = longest, int(longest * ratio) + int(longest * ratio) % 2
    rows, columns = (math.ceil(side / size) for side in (max(1, high), max(1, wide)))
    return rows * columns + 1 if rows * columns > 1 else 1


# ---------------------------------------------------------------------------------------------------------------------
# Towers


def _vit(vision: Config, patches: int, seen: float, outside: int, **more: Any) -> Stack:
    """Return a tower of CLIP's kind: convolution, positions, layers of LayerNorm with biases."""
    h, heads = vision["hidden_size"], vision["num_attention_heads"]
    stem = vision.get("num_channels", 3) * _first(vision["patch_size"]) ** 2 * h
    return Stack(
        hidden_size=h,
        num_layers=vision["num_hidden_layers"],
        intermediate_size=vision["intermediate_size"],
        num_heads=heads,
        head_dim=h // heads,
        tokens=patches,
        seen=seen,
        activation=vision.get("hidden_act", "gelu"),
        num_outside=stem + outside,
        outside_flops=2 * stem * patches,
        input_flops=2 * stem * patches,
        outside_bytes=(8 * h * patches, 8 * h * patches),
        **more,
    )


def _siglip(vision: Config, patches: int, seen: float) -> Stack:
    h, f = vision["hidden_size"], vision["intermediate_size"]
    positions = (_first(vision["image_size"]) // _first(vision["patch_size"])) ** 2
    has_head = vision.get("model_type") == "siglip_vision_model" and vision.get("vision_use_head", True)
    head = (h + 4 * h * h + 4 * h + 2 * h + 2 * h * f + f + h) * has_head
    return _vit(vision, patches, seen, h + positions * h + 2 * h + head, num_unreached=head)


def _clip(vision: Config, patches: int, seen: float) -> Stack:
    if vision.get("model_type", "clip_vision_model") != "clip_vision_model":
        return _siglip(vision, patches, seen)
    h = vision["hidden_size"]
    positions = (_first(vision["image_size"]) // _first(vision["patch_size"])) ** 2 + 1
    return _vit(vision, patches, seen, h + positions * h + 4 * h)


def _internvl(vision: Config, patches: int, seen: float) -> Stack:
    h, has_bias = vision["hidden_size"], bool(vision.get("attention_bias"))
    positions = (_first(vision["image_size"]) // _first(vision["patch_size"])) ** 2 + 1
    outside = 2 * h + (positions * h) * vision.get("use_absolute_position_embeddings", True)
    outside += h * bool(vision.get("use_mask_token")) + 2 * h * (not vision.get("use_mean_pooling", True))
    has_rms = vision.get("norm_type", "layer_norm") == "rms_norm"
    extra = 2 * h + 2 * h * bool(vision.get("use_qk_norm"))
    more = {"has_rms": has_rms, "extra_layer": extra, "has_query_bias": has_bias, "has_key_bias": has_bias}
    more |= {"names": ("q_proj", "k_proj", "v_proj", "projection_layer", "fc1", "fc2", "fc3")}
    return _vit(vision, patches, seen, outside, **more)


def _qwen(vision: Config, patches: int, seen: float) -> Stack:
    """Return the tower of Qwen2-VL to Qwen3-VL: one matrix of queries, keys and values; in 2.5 windows, gates and RMS."""
    h, depth, heads = vision.get("embed_dim", vision["hidden_size"]), vision["depth"], vision["num_heads"]
    is_windowed = "fullatt_block_indexes" in vision
    if is_windowed:
        near = min(seen, (vision.get("window_size", 112) // vision["patch_size"]) ** 2)
        num_full = len(vision["fullatt_block_indexes"])
        seen = (num_full * seen + (depth - num_full) * near) / depth
    shape = {
        "hidden_size": h,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "intermediate_size": vision.get("intermediate_size") or int(h * vision.get("mlp_ratio", 4)),
        "patch_size": vision["patch_size"],
        "num_channels": vision.get("in_channels", vision.get("in_chans", 3)) * vision.get("temporal_patch_size", 2),
        "hidden_act": vision.get("hidden_act", "gelu"),
    }
    positions = vision.get("num_position_embeddings", 0)
    outside = (positions + 1) * h if positions else 0  # with positions its convolution has a bias
    names = ("q", "k", "v", "proj", "fc1", "fc2", "fc3")
    if is_windowed:
        names = ("q", "k", "v", "proj", "gate_proj", "down_proj", "up_proj")
    elif positions:
        names = ("q", "k", "v", "proj", "linear_fc1", "linear_fc2", "fc3")
    return _vit(shape, patches, seen, outside, is_fused=True, is_gated=is_windowed, has_rms=is_windowed, names=names)


# ---------------------------------------------------------------------------------------------------------------------
# Bridges


def _mlp_bridge(
    first: int,
    middle: int,
    last: int,
    norm: int,
    biases: bool = True,
    names: tuple[str, str] = ("linear_1", "linear_2"),
) -> Bridge:
    """Return a bridge of two matrices and a normalisation."""
    size = first * middle + middle * last
    matrices = ((names[0], first, middle), (names[1], middle, last))
    return Bridge(size + (middle + last) * biases + norm, 2 * size, 2 * first + 3 * middle, matrices)


def _llava_bridge(config: Config, vision: Config, width: int) -> Bridge:
    layers = config.get("vision_feature_layer", -2)
    first = vision["hidden_size"] * (len(layers) if isinstance(layers, list) else 1)
    return _mlp_bridge(first, width, width, 0, config.get("multimodal_projector_bias", True))


def _gemma_bridge(config: Config, vision: Config, width: int) -> Bridge:
    h = vision["hidden_size"]
    return Bridge(h * width + h, 2 * h * width, 4 * h)


def _idefics_bridge(config: Config, vision: Config, width: int) -> Bridge:
    first = vision["hidden_size"] * config.get("scale_factor", 2) ** 2
    return Bridge(first * width, 2 * first * width, first, (("proj", first, width),))


def _internvl_bridge(config: Config, vision: Config, width: int) -> Bridge:
    first = vision["hidden_size"] * round(1 / config.get("downsample_ratio", 0.5)) ** 2
    return _mlp_bridge(first, width, width, 2 * first)


def _qwen_bridge(config: Config, vision: Config, width: int) -> Bridge:
    h = vision.get("embed_dim", vision["hidden_size"])
    first = h * vision.get("spatial_merge_size", 2) ** 2
    has_names = vision.get("num_position_embeddings", 0) > 0
    names = ("linear_fc1", "linear_fc2") if has_names else ("0", "2")  # of Qwen3-VL, and of those before it
    merger = _mlp_bridge(first, first, width, h * (1 if "fullatt_block_indexes" in vision else 2), names=names)
    deep = _mlp_bridge(first, first, width, 2 * first, names=names)
    num_deep = len(vision.get("deepstack_visual_indexes", ()))
    size, flops, numbers = (a + num_deep * b for a, b in zip(merger[:3], deep[:3], strict=True))
    return Bridge(size, flops, numbers, merger.matrices + num_deep * deep.matrices)


KINDS: dict[str, tuple[Callable[[Config, int, float], Stack], Callable[[Config, Config, int], Bridge], bool]] = {
    "llava": (_clip, _llava_bridge, False),
    "gemma3": (_siglip, _gemma_bridge, True),
    "idefics3": (_siglip, _idefics_bridge, False),
    "smolvlm": (_siglip, _idefics_bridge, False),
    "internvl": (_internvl, _internvl_bridge, True),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), (_qwen, _qwen_bridge, False)),
}
"""`model_type` -> its tower, its bridge, whether its head is the embedding where the configuration does not say it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageText(Decoder):
    """A decoder that reads texts and pictures, in training; `sequence_length` counts the tokens of both.

    Attributes:
        tower: over the patches of all pictures of a sample.
        bridge: from the tower to the decoder.
        image_tokens: tokens of a sample that stand for pictures.
        trains_bridge: whether the bridge is trained.
        bridge_method: its adapters, where they name its layers; None: it gets none.
        images: height and width of each image of a sample.
    """

    tower: Stack
    bridge: Bridge
    image_tokens: int
    trains_bridge: bool = True
    bridge_method: Tuning | None = None
    images: tuple[tuple[int, int], ...] = ()

    @property
    def bridge_adapter(self) -> int:
        """Parameters of the adapters on the bridge."""
        method = self.bridge_method
        if method is None or method.rank is None:
            return 0
        adapted = [(width, out) for name, width, out in self.bridge.matrices if method.is_adapted(name)]
        return sum(method.rank * (width + out) + out * method.uses_dora for width, out in adapted)

    @property
    def is_bridge_passed(self) -> bool:
        """Whether the backward goes through the bridge."""
        return self.trains_bridge or self.bridge_adapter > 0 or self.tower.is_passed

    @property
    def text(self) -> Decoder:
        """The decoder alone, over as many tokens."""
        return Decoder(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Decoder)})

    @property
    def num_parameters(self) -> int:
        """All parameters, of tower and bridge, too."""
        return self.text.num_parameters + self.tower.num_base + self.tower.num_adapter + self._num_bridge

    @property
    def _num_bridge(self) -> int:
        return self.bridge.num_parameters + self.bridge_adapter

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        # Without adapters the decoder counts all of its parameters
        bridge = self.bridge.num_parameters * self.trains_bridge + self.bridge_adapter
        return self.text.num_trained + self.tower.num_trained + bridge

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return self.text.weight_bytes + self.tower.weight_bytes + 4 * self._num_bridge

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward of a sample."""
        return self.text.forward_flops + round(self.tower.forward_flops + self._bridge_flops)

    @property
    def _bridge_flops(self) -> int:
        return self.image_tokens * self.bridge.flops_per_token

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward of a sample: the bridge's inputs have a gradient only where the tower is trained."""
        times = 1 + self.trains_bridge + self.tower.is_passed
        return self.text.flops_per_sample + round(self.tower.flops + times * self._bridge_flops)

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's products, forward and backward."""
        return self.text.attention_flops + self.tower.attention_flops * (3 if self.tower.is_passed else 1)

    def picture_bytes(self, *, autocast: bool, gradient_checkpointing: bool = False) -> int:
        """Count the bytes that tower and bridge save of a sample for their backward, and their output."""
        tower = self.tower.kept_bytes if gradient_checkpointing else self.tower.saved_bytes
        bridge = self.image_tokens * self.bridge.numbers_per_token * (2 if autocast else 4) * self.is_bridge_passed
        return round(tower(autocast=autocast) + bridge + 4 * self.image_tokens * self.hidden_size)

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves, logits excluded."""
        return self.text.saved_bytes(autocast=autocast) + self.picture_bytes(autocast=autocast)

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which traffic is measured: of a tower that is not passed back a third, as of its work."""
        tower = dataclasses.replace(self.tower, is_trained=True, method=None)
        share = 1.0 if self.tower.is_passed else 1 / 3
        return self.text.traffic_bytes(autocast=autocast) + round(share * tower.saved_bytes(autocast=autocast))

    def _extend(
        self, peaks: tuple[Peak, ...], num_samples: int, autocast: bool, is_recomputed: bool
    ) -> tuple[Peak, ...]:
        """Add tower and bridge to the peaks of the decoder; the last peak is that of the tower's last layer."""
        kept = num_samples * self.picture_bytes(autocast=autocast, gradient_checkpointing=is_recomputed)
        trained = self.bridge.num_parameters * self.trains_bridge + self.tower.count_cast() * self.tower.is_passed
        cast = 2 * trained * autocast
        extended = tuple(
            peak._replace(autocast_cache=peak.autocast_cache + cast, activations=peak.activations + kept)
            for peak in peaks
        )
        if not self.tower.is_passed:
            return extended
        again = self.tower.layer_bytes(autocast=autocast) * is_recomputed + self.tower.temporary_bytes(
            autocast=autocast
        )
        return (*extended, Peak(cast, kept + round(num_samples * again), peaks[-1].head, peaks[-1].gathered))

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the peaks of a micro-batch: the decoder's, with what tower and bridge keep, and the tower's."""
        peaks = self.text.peaks(num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing)
        return self._extend(peaks, num_samples, autocast, gradient_checkpointing)

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights; tower and bridge are gathered beside the decoder."""
        options = {"gathered_bytes": gathered_bytes, "num_processes": num_processes}
        peaks = self.text.sharded_peaks(
            num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing, **options
        )
        whole = gathered_bytes * (self.tower.num_outside + self.bridge.num_parameters + 2 * self.tower.layer_parameters)
        extended = self._extend(peaks, num_samples, autocast, gradient_checkpointing)
        return tuple(peak._replace(gathered=peak.gathered + whole) for peak in extended)


def model_from_config(
    config: Config,
    images: Sequence[tuple[int, int]],
    text_tokens: int,
    *,
    name: str,
    method: Tuning | None = None,
    trains_tower: bool = False,
    trains_bridge: bool = True,
    adapts_bridge: bool = False,
    trains_text: bool = True,
    processor: Config | None = None,
) -> ImageText:
    """Return the shape of a model of pictures and texts, and what of it is trained.

    Args:
        config: as of transformers.
        images: height and width in pixels of each picture of a sample.
        text_tokens: tokens of a sample that are no pictures.
        name: for messages.
        method: of the decoder: all weights, or adapters; None: all weights.
        trains_tower: whether the tower is trained, or gets the adapters, too; else it is frozen, and its work is a forward.
        trains_bridge: whether the bridge is trained.
        adapts_bridge: whether it gets the adapters, where they name its layers.
        trains_text: whether the decoder is trained, or gets the adapters; else it passes gradients to what lies below.
        processor: as of `count_patches`.

    Raises:
        UsageError: an unknown model_type, a missing field, more tokens than the model has positions.
    """
    kind, method = _find_kind(config), method or Tuning()
    make_tower, make_bridge, is_tied = KINDS[kind]
    shape = base_models.shape_from_config(config, name)
    text = config.get("text_config") or {}
    shape = dataclasses.replace(
        shape, tied_head=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", is_tied)))
    )
    vision = config["vision_config"]
    try:
        pictures = [count_patches(config, height, width, processor) for height, width in images]
        patches, tokens = (sum(getattr(picture, field) for picture in pictures) for field in ("patches", "tokens"))
        # A token sees those of its own tile
        seen = sum(picture.patches**2 / picture.tiles for picture in pictures) / max(1, patches)
        tower, bridge = make_tower(vision, patches, seen), make_bridge(config, vision, shape.hidden_size)
    except KeyError as error:
        raise UsageError(f"{name}: its configuration has no {error.args[0]}") from None
    length = text_tokens + tokens
    if shape.max_length is not None and length > shape.max_length:
        raise UsageError(
            f"{name} has {shape.max_length:,} positions, but a sample has {length:,} tokens, {tokens:,} of them of pictures"
        )
    # A loss of LLaVA reaches neither the tower's last normalisation nor layers behind the one that it takes
    if kind == "llava":
        layer = config.get("vision_feature_layer", -2)
        last = max(layer) if isinstance(layer, list) else layer
        left_out = -1 - last if last < 0 else tower.num_layers - last
        tower = dataclasses.replace(
            tower, num_unreached=tower.num_unreached + 2 * tower.hidden_size + left_out * tower.layer_parameters
        )
    if not trains_tower:
        frozen = dataclasses.replace(method, rank=None, is_quantized=False)
        tower = dataclasses.replace(tower, is_trained=False, method=frozen)
    elif method.rank is not None:
        tower = dataclasses.replace(tower, is_trained=False, method=method)
    return ImageText(
        shape=shape,
        # Adapters of rank 0 on no layer: nothing is trained, and gradients pass to what lies below
        method=method if trains_text else dataclasses.replace(method, rank=0, targets=()),
        sequence_length=length,
        tower=tower,
        bridge=bridge,
        image_tokens=tokens,
        trains_bridge=trains_bridge,
        bridge_method=method if adapts_bridge else None,
        images=tuple(images),
    )
