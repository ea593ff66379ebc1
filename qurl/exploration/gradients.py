"""Which tokens have a gradient under each objective: ``notebooks/20_objectives.ipynb``."""

from collections.abc import Iterable, Sequence

import pandas as pd
import pydantic
import torch

from qurl.notebook import Parameters
from qurl.objectives import OBJECTIVES, token_loss


class ObjectivesConfig(Parameters):
    """Parameters of ``notebooks/20_objectives.ipynb``."""

    w: float = pydantic.Field(ge=0.1, le=10, examples=["4.0"])
    advantage: float = pydantic.Field(ge=-2, le=2, examples=["1.0"])
    eps_low: float = pydantic.Field(gt=0, lt=1, examples=["0.2"])
    eps_high: float = pydantic.Field(gt=0, le=1, examples=["0.2"])
    cap: float = pydantic.Field(ge=1, le=10, examples=["2.0"])


def objective_and_gradient(
    objective: str,
    w: torch.Tensor | float,
    ratio: torch.Tensor | float,
    advantage: torch.Tensor | float,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    cap: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of tokens with given w and R, and what autograd says of it.

    Parameters
    ----------
    objective : str
    w, ratio, advantage : torch.Tensor or float
        π_prox/π_behav, R = π_θ/π_prox and A, broadcast against each other.
    eps_low, eps_high, cap : float

    Returns
    -------
    value, gradient : torch.Tensor
        Minus `qurl.objectives.token_loss`, and its derivative by log π_θ: the factor in front of ∇ log π_θ.
    """
    w, ratio, advantage = torch.broadcast_tensors(
        *(torch.as_tensor(x, dtype=torch.float64) for x in (w, ratio, advantage))
    )
    # Any log-prob will do for π_prox: only ratios enter.
    prox = torch.full((1, w.numel()), -1.0, dtype=torch.float64)
    logps = (prox + ratio.reshape(1, -1).log()).requires_grad_()
    value = -token_loss(
        objective,
        logps,
        prox,
        prox - w.reshape(1, -1).log(),
        advantage.reshape(1, -1),
        eps_low=eps_low,
        eps_high=eps_high,
        cap=cap,
    )
    (gradient,) = torch.autograd.grad(value.sum(), logps)
    return value.detach().reshape(w.shape), gradient.reshape(w.shape)


def objective_curves(
    w: float = 4.0,
    advantage: float = 1.0,
    *,
    ratios: Iterable[float] | None = None,
    **bounds: float,
) -> pd.DataFrame:
    """All five objectives over R, for one w and A.

    Parameters
    ----------
    w, advantage : float
    ratios : iterable of float, optional
        Values of R; default 401 from 0.005 to 3.
    **bounds : float
        ``eps_low``, ``eps_high``, ``cap``.

    Returns
    -------
    pandas.DataFrame
        ``objective``, ``ratio``, ``value``, ``gradient``; see `objective_and_gradient`.
    """
    grid = torch.linspace(0.005, 3, 401, dtype=torch.float64)
    grid = grid if ratios is None else torch.tensor([*ratios], dtype=torch.float64)
    tables = []
    for objective in OBJECTIVES:
        value, gradient = objective_and_gradient(objective, w, grid, advantage, **bounds)
        tables.append(
            pd.DataFrame(
                {
                    "objective": objective,
                    "ratio": grid.numpy(),
                    "value": value.numpy(),
                    "gradient": gradient.numpy(),
                }
            )
        )
    return pd.concat(tables, ignore_index=True)


def gradient_map(
    objectives: Sequence[str] = ("tis", "acr"), advantages: Sequence[float] = (1.0, -1.0), **bounds: float
) -> pd.DataFrame:
    """Which tokens of a grid over w and R have a gradient, per objective and advantage.

    Parameters
    ----------
    objectives, advantages : sequence
    **bounds : float
        ``eps_low``, ``eps_high``, ``cap``.

    Returns
    -------
    pandas.DataFrame
        ``advantage``, ``w`` (0.25 to 16, evenly on a log axis), ``ratio`` (R, 0.02 to 4), and one bool per objective:
        is the gradient by log π_θ non-zero.
    """
    w = torch.logspace(-2, 4, 121, base=2, dtype=torch.float64)
    ratio = torch.linspace(0.02, 4, 121, dtype=torch.float64)
    columns, rows = (grid.flatten() for grid in torch.meshgrid(w, ratio, indexing="ij"))
    tables = []
    for advantage in advantages:
        table = pd.DataFrame({"advantage": advantage, "w": columns.numpy(), "ratio": rows.numpy()})
        for objective in objectives:
            _, gradient = objective_and_gradient(objective, columns, rows, advantage, **bounds)
            table[objective] = (gradient != 0).numpy()
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def gradient_shares(
    log_w_std: float, log_ratio_std: float, *, tokens: int = 200_000, seed: int = 0, **bounds: float
) -> pd.DataFrame:
    """How many tokens the choice of objective concerns: made-up tokens with log-normal w and R and A = ±1.

    Parameters
    ----------
    log_w_std : float
        Standard deviation of log w, whose mean makes w 1 on average: KL(behav‖prox) is half its square.
    log_ratio_std : float
        Of log R, likewise.
    tokens, seed : int
    **bounds : float
        ``eps_low``, ``eps_high``, ``cap``.

    Returns
    -------
    pandas.DataFrame
        Per objective ``with_gradient`` (share of tokens), ``mean_weight`` (mean |∂/∂log π_θ|) and ``largest``.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn((2, tokens), generator=generator, dtype=torch.float64)
    w = (noise[0] * log_w_std - log_w_std**2 / 2).exp()
    ratio = (noise[1] * log_ratio_std - log_ratio_std**2 / 2).exp()
    advantage = torch.ones(tokens, dtype=torch.float64)
    advantage[::2] = -1
    rows = {}
    for objective in OBJECTIVES:
        _, gradient = objective_and_gradient(objective, w, ratio, advantage, **bounds)
        size = gradient.abs()
        rows[objective] = {
            "with_gradient": (size > 0).double().mean().item(),
            "mean_weight": size.mean().item(),
            "largest": size.max().item(),
        }
    return pd.DataFrame(rows).T.rename_axis("objective")
