"""What both pages share: the templates with every text escaped, the styles, and the plots that alone are markup."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent


def environment() -> Environment:
    """Jinja with autoescape; `styles` is the style sheet, `svg(plot)` a plot, whose own text matplotlib escaped."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.globals["styles"] = Markup((TEMPLATES / "report.css").read_text(encoding="utf-8"))
    made.globals["svg"] = lambda plot: Markup(plot.svg)
    return made
