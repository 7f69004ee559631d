"""The configuration: pydantic models, loading with overrides, derived values."""

from rollmesh.mesh.config.load import load_as, load_config, parse_overrides, save_config
from rollmesh.mesh.config.models import Config

__all__ = ["Config", "load_as", "load_config", "parse_overrides", "save_config"]
