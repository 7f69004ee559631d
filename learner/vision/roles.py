"""Roles next to an actor that takes images: what they need to see the same prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.mesh.errors import ConfigError

# By what images become tokens and pixels, in a model's configuration and in that of its vision part.
_OF_TOKENS = ("image_token_id", "image_token_index", "scale_factor")
_OF_PIXELS = ("image_size", "patch_size", "in_channels", "num_channels", "temporal_patch_size", "spatial_merge_size")


def check_role(role: str, setting: str, own: Mapping[str, Any], actor: Mapping[str, Any]) -> None:
    """Refuses a role's model that cannot take the prompts of the actor: they come as its tokens and pixels.

    Args:
        role: of the model.
        setting: the key of its folder, for errors.
        own: the configuration of its folder, keys as Hugging Face names them.
        actor: the same of the actor, which takes images.

    Raises:
        ConfigError: names the role, and what differs.
    """
    kinds = own.get("model_type"), actor.get("model_type")
    if kinds[0] != kinds[1]:
        what = f"it is a model of model_type {kinds[0]}"
    else:
        different = [f"{key} {own.get(key)}" for key in _OF_TOKENS if own.get(key) != actor.get(key)]
        ours, theirs = own.get("vision_config") or {}, actor.get("vision_config") or {}
        different += [f"vision_config.{key} {ours.get(key)}" for key in _OF_PIXELS if ours.get(key) != theirs.get(key)]
        if not different:
            return
        what = f"it has {', '.join(different)}"
    raise ConfigError(
        f"{setting}: the actor takes images, and role {role} would get them as the actor's tokens and pixels; {what}",
        hint=f"choose a model of model_type {kinds[1]} for it that takes the same images, such as the actor's own "
        "(leave the path out)",
    )
