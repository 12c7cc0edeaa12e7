"""A model at an input, recorded once as a graph; where its maps begin and end is asked of that graph."""

from howsmooth.program.confirm import record
from howsmooth.program.ends import Ends, ends_of
from howsmooth.program.layers import Layers
from howsmooth.program.replay import Run, Way
from howsmooth.program.tracing import Program

__all__ = ["Ends", "Layers", "Program", "Run", "Way", "ends_of", "record"]
