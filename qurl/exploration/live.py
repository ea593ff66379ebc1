"""Controls of a notebook cell, and the drawing that follows them."""

from collections.abc import Callable
from typing import Any


def show_live(draw: Callable[..., Any], **controls: "ipywidgets.ValueWidget") -> None:  # noqa: F821
    """Display controls, and below them what ``draw`` makes of their values, anew whenever one changes.

    The drawing is an output of the cell and not part of a widget, so it stays visible where no kernel runs: in a
    notebook that papermill executed, or exported.

    Parameters
    ----------
    draw : callable
        Called with the value of each control under the control's name; returns what IPython can display.
    **controls : ipywidgets.ValueWidget
    """
    import ipywidgets
    from IPython.display import display

    def drawing() -> Any:
        return draw(**{name: control.value for name, control in controls.items()})

    layout = ipywidgets.Layout(flex_flow="row wrap")
    display(ipywidgets.Box(list(controls.values()), layout=layout))
    handle = display(drawing(), display_id=True)
    for control in controls.values():
        control.observe(lambda _: handle.update(drawing()), names="value")
