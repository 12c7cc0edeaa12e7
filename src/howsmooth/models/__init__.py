"""Real models: any Hugging Face transformer or torch module, measured layer by layer."""

from howsmooth.models.capture import Capture, FallbackWarning
from howsmooth.models.cut import MAPS, MapName
from howsmooth.models.loading import load
from howsmooth.models.measurement import Measurement
from howsmooth.models.model import Model
from howsmooth.models.tokens import Text, Window

__all__ = ["MAPS", "Capture", "FallbackWarning", "MapName", "Measurement", "Model", "Text", "Window", "load"]
