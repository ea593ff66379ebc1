"""What the notebooks 10 to 30 of ``notebooks/`` compute, one module each: every number they show is one call away.

Nothing here is a second definition: codes come from `qurl.quantization`, objectives from `qurl.objectives` and
autograd, UAQ and its control arm from `qurl.uaq`. Figures of the tables: `qurl.plots.explore`.
"""
