"""Define ResNet with group normalisation, the only model class here that transformers saves and loads.

`save_pretrained` copies this file beside the weights, so that `AutoModelForImageClassification.from_pretrained(FOLDER,
trust_remote_code=True)` needs nothing else of this repository.
"""

from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

GROUPS = 32
"""Groups of group normalisation (Wu and He, 2018, arXiv:1803.08494); fewer where the channels are no multiple of it."""


class GroupNormResNetConfig(ResNetConfig):
    """Configures `GroupNormResNet`, like `ResNetConfig`."""

    model_type = "group_norm_resnet"


class GroupNormResNet(ResNetForImageClassification):
    """Replaces the batch normalisations of ResNet by group normalisations: no sample depends on the others."""

    config_class = GroupNormResNetConfig

    def __init__(self, config: GroupNormResNetConfig):
        super().__init__(config)
        for module in list(self.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, group_norm(child.num_features))


def group_norm(channels: int) -> nn.GroupNorm:
    """Make a group normalisation of feature maps with so many channels."""
    return nn.GroupNorm(next(groups for groups in range(GROUPS, 0, -1) if channels % groups == 0), channels)


GroupNormResNetConfig.register_for_auto_class()
GroupNormResNet.register_for_auto_class("AutoModelForImageClassification")
