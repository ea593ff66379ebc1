"""One function per figure: data frame in, matplotlib figure out.

Figures are built without pyplot's global state, so that a notebook shows each once and a script needs no
display. Colours are seaborn's colour-blind palette; what a mark means never rests on its colour alone.
"""

from qurl.plots.quantized import logprobs, quantization
from qurl.plots.runs import convergence, curves, run_curves, scores, windowed
from qurl.plots.speedup import speedup

__all__ = ["convergence", "curves", "logprobs", "quantization", "run_curves", "scores", "speedup", "windowed"]
