"""Real models: any Hugging Face transformer or torch module, measured layer by layer."""

from howsmooth.models.capture import Capture
from howsmooth.models.lens import Lens
from howsmooth.models.loading import PACKAGED, load, measuring_device
from howsmooth.models.measurement import Measurement, Measurements
from howsmooth.models.model import Model
from howsmooth.models.model_input import FallbackWarning
from howsmooth.models.patching import patch, use_sdpa
from howsmooth.models.tokens import Text, Window
from howsmooth.program.ends import MAPS, MapName

__all__ = [
    "MAPS",
    "PACKAGED",
    "Capture",
    "FallbackWarning",
    "Lens",
    "MapName",
    "Measurement",
    "Measurements",
    "Model",
    "Text",
    "Window",
    "load",
    "measuring_device",
    "patch",
    "use_sdpa",
]
