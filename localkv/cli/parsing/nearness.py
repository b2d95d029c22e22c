"""How near to the user a value comes from: the nearest value wins."""

from __future__ import annotations

import click
from click.core import ParameterSource

_ORDER = (
    ParameterSource.COMMANDLINE,
    ParameterSource.ENVIRONMENT,
    ParameterSource.DEFAULT_MAP,  # the configuration file
)


def distance(ctx: click.Context, name: str) -> int:
    """0 for the command line, then variables, then the configuration file, then the default."""
    source = ctx.get_parameter_source(name)
    return _ORDER.index(source) if source in _ORDER else len(_ORDER)
