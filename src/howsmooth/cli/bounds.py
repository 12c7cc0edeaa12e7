"""`howsmooth bounds`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from howsmooth.cli.root import Debug, Json, app, one_sentence
from howsmooth.cli.shared import one_head, read_matrices
from howsmooth.errors import BadInputError
from howsmooth.maps import Attention
from howsmooth.verbs import bounds as bounds_of


@app.command()
def bounds(
    radius: Annotated[float, typer.Option(help="radius of the ball the tokens live in")],
    n: Annotated[int, typer.Option(help="number of tokens")] = 1024,
    gamma: Annotated[float | None, typer.Option(help="one head with A = gamma · I and V = I")] = None,
    dim: Annotated[int, typer.Option(help="width of the tokens for --gamma")] = 1,
    weights: Annotated[Path | None, typer.Option(help="a safetensors file with matrices A and V")] = None,
    causal: Annotated[bool, typer.Option(help="masked attention")] = False,
    figure: Annotated[Path | None, typer.Option(help="also draw the ladder n = 1 … 10⁹ (.png, .pdf or .svg)")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print every bound on the Lipschitz constant over a ball of tokens.

    Example: howsmooth bounds --gamma -1 --radius 2 --n 1024 --figure ladder.png
    """
    with one_sentence(debug):
        attn = _single_head(gamma, dim, weights, causal)
        table = bounds_of(attn, n=n, radius=radius)
        print(json.dumps(table.to_dict(), indent=1) if as_json else table)
        if figure is not None:
            from howsmooth.paper import draw_ladder

            path = draw_ladder(figure, attn, radius)
            if not as_json:
                print(path)


def _single_head(gamma: float | None, dim: int, weights: Path | None, causal: bool) -> Attention:
    if (gamma is None) == (weights is None):
        raise BadInputError("expected either --gamma or --weights, got both or neither; give one of them")
    if gamma is not None:
        if dim < 1:
            raise BadInputError(f"expected --dim of at least 1, got {dim}; it is the width of a token")
        return one_head(gamma, dim, causal)
    assert weights is not None
    tensors = read_matrices(weights, ("A", "V"))
    return Attention.from_matrices(tensors["A"].double(), tensors["V"].double(), causal=causal)
